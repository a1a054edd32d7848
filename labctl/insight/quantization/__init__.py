"""What rounding a model's weights costs and gains (`labctl quantize`).

Owns: the program that rounds a language model (`language_model_program`), the call of the project's
own quantize.py (`comparison`), what both measure (`measurements`), and whether accuracies differ by
more than chance (`paired_tests`).

May import: runs and below.
"""
