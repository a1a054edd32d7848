"""What rounding a model's weights costs and gains (`labctl quantize`).

Owns: the program that rounds a language model (`language_model_program`), the call of the project's
own quantize.py, and the table of both (`comparison`), what was measured (`measurements`).

May import: runs and below.
"""
