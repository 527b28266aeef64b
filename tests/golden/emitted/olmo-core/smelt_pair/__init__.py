# SPDX-License-Identifier: Apache-2.0
"""A compute-matched pair for OLMo-core: `baseline.json` and `twin.json`, and the classes that they name."""
