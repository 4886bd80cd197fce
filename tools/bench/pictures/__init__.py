"""Results as pictures. Needs matplotlib, and is imported only where a picture is wanted.

Pure functions from a result, as it stands in its JSON file, to a Figure; nothing is shown, and no
state of matplotlib's own (pyplot's) is touched.
"""
