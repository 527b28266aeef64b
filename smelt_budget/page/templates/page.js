"use strict";
// Draws the plots from the JSON beside this script, and opens what is folded before the page is printed.
(() => {
  const plots = JSON.parse(document.getElementById("smelt-plots").textContent);
  const fine = matchMedia("(pointer: fine)").matches;
  const family = getComputedStyle(document.body).fontFamily;
  const common = () => ({
    font: { family, size: 12 },
    margin: { l: 8, r: 12, t: 8, b: 8 },
    height: 340,
    hovermode: "closest",
    dragmode: fine ? "zoom" : false,
    paper_bgcolor: "rgba(0,0,0,0)",
    modebar: { bgcolor: "rgba(0,0,0,0)", orientation: "v" },
    plot_bgcolor: "rgba(0,0,0,0)",
    legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom" },
  });
  const drawn = [];
  for (const [name, plot] of Object.entries(plots)) {
    const place = document.getElementById(name);
    const layout = Object.assign(common(), plot.layout);
    layout.height = Math.max(layout.height, 0) + (place.clientWidth < 500 ? legendRoom(plot.data) : 0);
    Plotly.newPlot(place, plot.data, layout, {
      displaylogo: false, responsive: true, scrollZoom: false,
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]], // none that talks to a server
    });
    drawn.push(place);
  }
  function legendRoom(traces) {
    const named = traces.filter((trace) => trace.name && trace.showlegend !== false).length;
    return 18 * Math.max(0, Math.ceil(named / 2) - 1);
  }

  for (const box of document.querySelectorAll(".command")) {
    if (!navigator.clipboard) break;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(box.querySelector("code").textContent);
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
    box.classList.add("copies");
    box.append(button);
  }

  const PRINTED = 660; // CSS pixels: an A4 or Letter page less its margins
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const one of folded) one.open = true;
    for (const place of drawn) Plotly.relayout(place, { width: PRINTED });
  });
  addEventListener("afterprint", () => {
    for (const one of folded) one.open = false;
    for (const place of drawn) Plotly.relayout(place, { width: null, autosize: true });
  });
})();
