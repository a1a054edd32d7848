"""Serving a language model behind an OpenAI-compatible endpoint (`labctl serve --model`).

Owns: where a model comes from and what its config says (`source`, `gguf_header`), which program
serves it and whether it fits (`engines`, `serving_plan`), the request for its service (`launch`),
what runs there before the engine (`guard_program`), and conversations with it (`endpoint`).

May import: runs and below, and the forwards of services.
"""
