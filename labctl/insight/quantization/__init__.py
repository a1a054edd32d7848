"""What rounding a model's weights costs and gains (`labctl quantize`).

Owns: the program that rounds a language model (`language_model_program`), the call of the project's
own quantize.py (`comparison`), and what both measure (`measurements`).

May import: runs and below.
"""
