"""The results presentation: one HTML file. Pure: facts go in, a page comes out.

`facts` is what is known of a run, `page` what is said of it, `charts` where the lines go,
`pictures` which pictures may be shown, `render` the HTML.
"""
