"""The page: values equal the JSON, text is inert, and Chromium draws it without an error or a request."""

import csv
import json
import re
import runpy
import shlex
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from smelt_budget.cli import app
from smelt_budget.laws.forms import SMELT
from smelt_budget.report.numbers import exact, signed_percent
from smelt_budget.spec.text import parse

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "smelt.yaml"
FAKE = runpy.run_path(str(ROOT / "tests" / "unit" / "verify_result.py"))
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
NASTY = "</script><b onmouseover=alert(1)>|`*_x"


def run(*arguments):
    return CliRunner().invoke(app, [str(word) for word in arguments])


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    """A folder of verify: made-up results of three seeds, sinks included."""
    return verify_folder(tmp_path_factory.mktemp("v") / "verify", FAKE["made"](sinks=True))


def verify_folder(folder, result):
    from smelt_budget.verify.verdict import verdict

    folder.mkdir()
    result["verdict"] = verdict(result)
    (folder / "verify.json").write_text(json.dumps(result), encoding="utf-8")
    lines = "".join(json.dumps(row) + "\n" for row in FAKE["metrics"](result))
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    """A ladder of two cells."""
    folder = tmp_path_factory.mktemp("l")
    grid = folder / "grid.yaml"
    grid.write_text("name: two\nscales: {one: smelt-200m-s95}\nexperts: {S85: 64, S95: 192}\n", encoding="utf-8")
    assert run("ladder", grid, "--out", folder / "ladder", "--price", 2).exit_code == 0
    return folder / "ladder"


@pytest.fixture(scope="module")
def law(ladder, tmp_path_factory):
    """A fit of the ladder's runs, with losses of the published law and a little noise."""
    rows = list(csv.DictReader((ladder / "runs.csv").read_text(encoding="utf-8").splitlines()))
    for place, row in enumerate(rows):
        k = SMELT.presets["smelt-baseline" if row["arm"] == "baseline" else "smelt-looped"]
        flops, sparsity, tokens = (float(row[name]) for name in ("flops_per_token", "sparsity", "tokens"))
        flops *= 1 + place % 3
        row["flops_per_token"], row["cell"] = flops, f"{row['cell']} {NASTY}"
        loss = k["E"] + k["A"] * (1 - sparsity) ** k["b"] / flops ** k["a"] + k["K"] / tokens ** k["c"]
        row["loss"] = loss + 0.001 * (place * 7 % 5 - 2)
    folder = tmp_path_factory.mktemp("f")
    with (folder / "runs.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    done = run("law", "fit", folder / "runs.csv", "--out", folder / "law", "--bootstrap", 10, "--starts", 3)
    assert done.exit_code == 0, done.stderr
    return folder / "law"


@pytest.fixture(scope="module")
def page(verified, law, ladder, tmp_path_factory):
    """All four sources on one page."""
    out = tmp_path_factory.mktemp("p") / "report.html"
    done = run("report", EXAMPLE, verified, law, ladder, "--out", out, "--title", f"Mine {NASTY}")
    assert done.exit_code == 0, done.stderr
    return out


class Reader(HTMLParser):
    """Tables, and the JSON block, by id of their section."""

    def __init__(self):
        super().__init__()
        self.section, self.tables, self.scripts = "", {}, {}
        self.cell = self.script = None
        self.tags = []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag == "section":
            self.section = attrs["id"]
        elif tag == "tr":
            self.tables.setdefault(self.section, []).append([])
        elif tag in ("td", "th"):
            self.cell = ""
        elif tag == "script":
            self.script = attrs.get("id", f"script {len(self.scripts)}")
            self.scripts[self.script] = ""

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.tables[self.section][-1].append(self.cell)
            self.cell = None
        elif tag == "script":
            self.script = None

    def handle_data(self, data):
        if self.cell is not None:
            self.cell += data
        elif self.script is not None:
            self.scripts[self.script] += data


def read_page(path):
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


def row(reader, section, name):
    """The cells of a row, by its first one."""
    return next(cells[1:] for cells in reader.tables[section] if cells and cells[0] == name)


def test_the_data_are_the_results(page, verified, law, ladder):
    """The JSON block holds what the commands wrote; of verify without each row's loss, of law fit without its draws."""
    chapters = json.loads(read_page(page).scripts["smelt-data"])["chapters"]
    assert [chapter["kind"] for chapter in chapters] == ["pair", "verify", "law", "ladder"]
    pair, checked, fitted, planned = (chapter["data"] for chapter in chapters)
    assert pair == parse(EXAMPLE.read_text(encoding="utf-8"), "example")
    theirs = json.loads((verified / "verify.json").read_text(encoding="utf-8"))
    assert checked["verdict"] == theirs["verdict"]
    assert checked["counts"] == theirs["counts"]
    assert checked["runs"]["twin"][0]["held_out"]["domains"] == theirs["runs"]["twin"][0]["held_out"]["domains"]
    assert fitted["arms"] == json.loads((law / "law.json").read_text(encoding="utf-8"))["arms"]
    assert planned == json.loads((ladder / "ladder.json").read_text(encoding="utf-8"))


def test_values_on_the_page_equal_the_json(page):
    """Budgets to every digit; counts, losses, gains and GPU-hours as they are rounded."""
    reader = read_page(page)
    pair, checked, fitted, planned = (c["data"] for c in json.loads(reader.scripts["smelt-data"])["chapters"])
    for name, group, key, gap in (
        ("training FLOPs / token", "flops", "training_per_token", "flops"),
        ("non-embedding parameters", "parameters", "non_embedding", "non_embedding_parameters"),
        ("KV bytes of a sequence", "kv_cache", "bytes_at_context", "kv_cache"),
    ):
        values = [exact(pair[arm]["ledger"][group][key]) for arm in ("baseline", "twin")]
        assert row(reader, "budgets1", name) == [*values, signed_percent(pair["gaps"][gap])]
    assert row(reader, "pair1", "experts") == ["192", "294"]
    assert row(reader, "counts2", "parameters")[1] == f"{checked['counts']['baseline']['parameters']['ledger']:,}"
    nats = checked["verdict"]["difference"]["nats_per_token"]
    shown = row(reader, "training2", "held-out nats / token")
    assert shown[2] == f"{nats['mean']:+.4f} ± {nats['half_width']:.4f}"
    for gain in fitted["gains"]:
        cells = row(reader, "gain3", f"{gain['compute']:.3g}" + (" *" if gain["extrapolated"] else ""))
        want = f"{100 * gain['gain']:.1f} % [{100 * gain['low']:.0f}, {100 * gain['high']:.0f}]"
        assert want in cells
    for cell in planned["cells"]:
        assert row(reader, "ladder4", cell["name"])[4:7] == [signed_percent(gap) for gap in cell["gaps"].values()]
        hours = cell["arms"]["baseline"]["shared"]["gpu_hours"]
        assert row(reader, "cost4", cell["name"])[4] == (f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}")


def test_plots_are_drawn_from_the_same_values(page):
    """Sinks by layer and visit: means over seeds of what verify measured; gaps and GPU-hours of the ladder."""
    reader = read_page(page)
    _, checked, _, planned = (c["data"] for c in json.loads(reader.scripts["smelt-data"])["chapters"])
    plots = json.loads(reader.scripts["smelt-plots"])
    second = next(trace for trace in plots["sinks2"]["data"] if trace["name"] == "twin, visit 2")
    runs = [run["sink"]["layers"] for run in checked["runs"]["twin"]]
    places = [i for i, entry in enumerate(runs[0]) if entry["visit"] == 1]
    assert second["x"] == [runs[0][i]["layer"] + 1 for i in places]
    assert second["y"] == pytest.approx([sum(run[i]["mass_mean"] for run in runs) / len(runs) for i in places])
    kv = next(trace for trace in plots["ladder-gaps4"]["data"] if trace["name"] == "KV cache")
    assert kv["y"] == pytest.approx([100 * cell["gaps"]["kv_cache"] for cell in planned["cells"]])
    bars = {trace["name"]: trace["y"] for trace in plots["hours4"]["data"]}
    assert bars["twin"] == [cell["arms"]["twin"]["shared"]["gpu_hours"] for cell in planned["cells"]]


def test_every_section_names_a_command_and_its_limits(page):
    """Toy scale, extrapolation and assumptions are said beside the headings."""
    text = page.read_text(encoding="utf-8")
    sections = re.findall(r"<section .*?</section>", text, re.DOTALL)
    assert len(sections) == 11
    assert all("<code>smelt-budget " in section for section in sections)
    for words in ("toy scale", "partly extrapolated", "planned, not trained", "MFU 40 % assumed", "does not predict"):
        assert words in text
    assert "extrapolated: the runs span" in text


def test_one_seed_is_said(tmp_path):
    """And no sign is spoken of."""
    folder = verify_folder(tmp_path / "one", FAKE["made"]((2.05,), (2.12,)))
    assert run("report", folder, "--out", tmp_path / "r.md").exit_code == 0
    text = (tmp_path / "r.md").read_text(encoding="utf-8")
    assert "(toy scale) (1 seed)" in text
    assert "no statement about its sign" in text


def test_nothing_of_the_users_becomes_markup(page):
    """Title and cells with a script's end, tags, pipes and backticks stay text, in both files."""
    reader = read_page(page)
    assert not [attrs for tag, attrs in reader.tags if tag == "b" or "onmouseover" in attrs]
    assert [tag for tag, _ in reader.tags].count("script") == 4
    assert json.loads(reader.scripts["smelt-data"])["title"] == f"Mine {NASTY}"
    traces = json.loads(reader.scripts["smelt-plots"])["residuals3"]["data"]
    assert all("<" not in text for trace in traces for text in trace["text"])
    written = page.with_suffix(".md").read_text(encoding="utf-8")
    assert not re.search(r"(?<!\\)<b", written)
    widths = {}
    for line in written.splitlines():
        if line.startswith("|"):
            widths.setdefault(len(re.findall(r"(?<!\\)\|", line)), line)
    assert all(count >= 3 for count in widths)


def test_the_page_is_one_file(page):
    """No address but those inside plotly's own code, a policy against every request, and under 6 MB."""
    assert page.stat().st_size < 6_000_000
    reader = read_page(page)
    policy = next(attrs["content"] for _, attrs in reader.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    outside = [
        attrs for tag, attrs in reader.tags if {"src", "srcset"} & attrs.keys() or tag in ("link", "iframe", "img")
    ]
    assert outside == []
    assert all(attrs["href"].startswith("#") for _, attrs in reader.tags if "href" in attrs)


def test_the_commands_give_the_results_again(page, law):
    """The pair's gives its twin, the law's gains their rows."""
    reader = read_page(page)
    chapters = json.loads(reader.scripts["smelt-data"])["chapters"]
    solved = shlex.split(chapters[0]["sections"][0]["command"])
    again = run(*solved[1:], "--json")
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout)["twin"]["spec"] == chapters[0]["data"]["twin"]["spec"]
    gained = shlex.split(chapters[2]["sections"][1]["command"])
    assert json.loads(run(*gained[1:], "--json").stdout)["gains"] == chapters[2]["data"]["gains"]


def test_a_pair_asked_otherwise_is_asked_so_again(tmp_path):
    """Every flag of the request that is not its default stands in the command."""
    asked = (
        "--heads",
        "sectioned",
        "--span",
        "1/3",
        "--hidden-multiple",
        8,
        "--tolerance",
        "3%",
        "--keep",
        "head_dim=64",
    )
    first = run("solve", *asked, "--out", tmp_path / "smelt.yaml", "--json")
    assert first.exit_code == 0, first.stderr
    data = json.loads(run("report", tmp_path / "smelt.yaml", "--json").stdout)
    command = shlex.split(data["chapters"][0]["sections"][0]["command"])
    again = json.loads(run(*command[1:], "--json").stdout)
    assert again["twin"] == json.loads(first.stdout)["twin"]


def test_markdown_alone_needs_no_plotly(tmp_path, monkeypatch):
    """--out .md; an HTML page says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run("report", EXAMPLE, "--out", tmp_path / "r.md").exit_code == 0
    result = run("report", EXAMPLE, "--out", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "pip install 'smelt-budget[report]'" in result.stderr
    assert not (tmp_path / "page.html").exists()


def test_files_are_not_written_over(tmp_path):
    """Neither of the two."""
    (tmp_path / "r.md").write_text("mine", encoding="utf-8")
    result = run("report", EXAMPLE, "--out", tmp_path / "r.html")
    assert result.exit_code == 2
    assert (tmp_path / "r.md").read_text(encoding="utf-8") == "mine"
    assert not (tmp_path / "r.html").exists()
    assert run("report", EXAMPLE, "--out", tmp_path / "r.html", "--force").exit_code == 0


def test_bad_sources_are_refused(tmp_path):
    """By what is wrong with them."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "law.json").write_text("{}", encoding="utf-8")
    (tmp_path / "verify.json").write_text("[1]", encoding="utf-8")
    broken = tmp_path / "broken"
    verify_folder(broken, FAKE["made"]())
    data = json.loads((broken / "verify.json").read_text(encoding="utf-8"))
    (broken / "verify.json").write_text(json.dumps(data | {"counts": {"agree": True}}), encoding="utf-8")
    for source, said in (
        (tmp_path / "none", "there is nothing at"),
        (tmp_path / "empty", "holds no"),
        (tmp_path / "law.json", "is no result of law"),
        (tmp_path / "verify.json", "holds no object"),
        (ROOT / "examples" / "base.yaml", "is no result of solve"),
        (broken, "is not what verify of this version writes"),
    ):
        result = run("report", source, "--out", tmp_path / "r.md")
        assert result.exit_code == 2, source
        assert said in result.stderr
    assert "neither .html nor .md" in run("report", EXAMPLE, "--out", tmp_path / "r.pdf").stderr
    assert "given twice" in run("report", EXAMPLE, EXAMPLE, "--out", tmp_path / "r.md").stderr


def test_a_diverged_run_and_counts_alone(tmp_path):
    """A loss that is no number is none in the page's JSON; counts alone are a page too."""
    result = FAKE["made"]((2.05, 2.06, float("nan")), (2.1, 2.2, 2.3))
    folder = verify_folder(tmp_path / "nan", result)
    assert run("report", folder, "--out", tmp_path / "nan.html").exit_code == 0
    data = json.loads(read_page(tmp_path / "nan.html").scripts["smelt-data"])
    assert data["chapters"][0]["data"]["runs"]["baseline"][2]["held_out"]["nats_per_token"] is None
    counts = {key: result[key] for key in ("version", "origin", "pair", "counts")}
    folder = tmp_path / "counts"
    folder.mkdir()
    verdict = {"counts_agree": True, "words": ["all agree"]}
    (folder / "verify.json").write_text(json.dumps(counts | {"verdict": verdict}), encoding="utf-8")
    assert run("report", folder, "--out", tmp_path / "counts.html").exit_code == 0
    assert "--counts-only" in (tmp_path / "counts.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b"])
def test_the_picture_shows_every_executed_layer(name, tmp_path):
    """As many rows as layers are run, in both arms; the core once for each visit."""
    assert run("solve", "--baseline", name, "--visits", 3, "--out", tmp_path / "smelt.yaml").exit_code == 0
    assert run("report", tmp_path / "smelt.yaml", "--out", tmp_path / "r.html").exit_code == 0
    data = parse((tmp_path / "smelt.yaml").read_text(encoding="utf-8"), "pair")
    svg = re.search(r"<svg.*?</svg>", (tmp_path / "r.html").read_text(encoding="utf-8"), re.DOTALL)[0]
    effective = sum(data[arm]["ledger"]["layers"]["effective"] for arm in ("baseline", "twin"))
    assert svg.count("<rect") == effective
    loop = data["twin"]["spec"]["loop"]
    assert svg.count('<rect class="core') == 3 * (loop["stop"] - loop["start"])


def drawn(path, folder, *flags):
    """The page as Chromium builds it, and what its console said."""
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--no-first-run",
        "--disable-background-networking", "--virtual-time-budget=10000", "--enable-logging=stderr", *flags,
        "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@browser
@pytest.mark.parametrize("flags", [(), ("--window-size=500,900",), ("--blink-settings=preferredColorScheme=0",)])
def test_chromium_draws_it_in_silence(page, tmp_path, flags):
    """Every plot is drawn, wide, narrow and dark; the console stays empty, where a blocked request would be told."""
    dom, console = drawn(page, tmp_path, *flags)
    assert console == []
    plots = json.loads(read_page(page).scripts["smelt-plots"])
    for name, plot in plots.items():
        place = dom[dom.index(f'id="{name}"') :]
        inside = place[: place.index("</figure>")]
        assert 'class="main-svg"' in inside, name
        named = {
            t["name"] for t in plot["data"] if t.get("name") and t.get("showlegend", True) and len(plot["data"]) > 1
        }
        assert inside.count('class="legendtext"') == len(named), name


@browser
def test_chromium_would_have_told(page, tmp_path):
    """The check itself: an error and a request are seen."""
    broken = tmp_path / "broken.html"
    text = page.read_text(encoding="utf-8")
    broken.write_text(text + '<script>fetch("https://example.com/x"); nothing.at.all()</script>', encoding="utf-8")
    _, console = drawn(broken, tmp_path / "profile")
    assert any("Content Security Policy" in line for line in console)
    assert any("ReferenceError" in line for line in console)


@browser
def test_it_prints_with_everything_open(page, tmp_path):
    """The tables behind the plots are in the PDF."""
    if shutil.which("pdftotext") is None:
        pytest.skip("pdftotext is not installed")
    out = tmp_path / "page.pdf"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=10000", "--no-pdf-header-footer", f"--print-to-pdf={out}", page.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, capture_output=True, timeout=240, check=True)
    text = subprocess.run(["pdftotext", "-layout", out, "-"], capture_output=True, text=True, check=True).stdout
    assert text.count("as a table") == len(json.loads(read_page(page).scripts["smelt-plots"]))
    assert re.search(r"layer +baseline +twin, visit 1 +twin, visit 2", text)
    assert "copy" not in text.split()
