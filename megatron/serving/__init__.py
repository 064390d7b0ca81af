# SPDX-License-Identifier: Apache-2.0
"""A server of trained models: OpenAI's and Megatron-LM's interfaces, and a page (`python -m megatron.tools.serve`)."""
