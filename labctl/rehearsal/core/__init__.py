"""The parts that all simulated clouds share.

May import: providers and the layers below, none of the clouds.
"""
