# SPDX-License-Identifier: Apache-2.0
"""A compute-matched pair for torchtitan: `--module THIS_PACKAGE --config baseline` or `--config twin`."""
