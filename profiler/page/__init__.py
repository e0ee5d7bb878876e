"""HTML pages: one file each, in one look, that loads nothing from anywhere.

`frame` is what all pages share, `charts` draws, and `lanes` draws time. Of what was measured, `plots` says which
chart shows which table, `timeline` puts what ran on lanes, and `report` puts it all on one page.
"""
