"""The report of a run: one HTML file. Pure functions from facts to a page.

`facts` is the input, `page` the text and figures, `charts` the geometry of the charts, `pictures`
the check of pictures, `render` the HTML.
"""
