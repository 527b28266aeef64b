# SPDX-License-Identifier: Apache-2.0
"""Train one arm with OLMo-core's own harness; the file says everything, and every key can be overridden.

    torchrun --nproc-per-node 8 -m THIS_PACKAGE.train twin --save-folder runs/twin \
        --dataset.paths='[data/*.npy]' --dataset.tokenizer.eos_token_id=0

Data are arrays of token ids (`data/*.npy`, as OLMo-core's numpy datasets take them); nothing is downloaded.
"""

from pathlib import Path

from olmo_core.script_utils import ExperimentConfig, get_cli_parser, main

HERE = Path(__file__).parent


def read(options, overrides) -> ExperimentConfig:
    """The arm's file, with what the command line changes."""
    config = ExperimentConfig.from_json(HERE / f"{options.arm}.json", overrides)
    config.trainer.save_folder = options.save_folder
    config.trainer.work_dir = options.work_dir
    config.dataset.work_dir = options.work_dir
    return config


if __name__ == "__main__":
    parser = get_cli_parser()
    parser.add_argument("arm", choices=("baseline", "twin"))
    main(read, parser)
