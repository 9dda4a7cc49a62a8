"""A run's figures as one HTML file that needs nothing else (layer P).

    charts  time lines, bars, lines, heat maps of marks whose colours are classes, so that light and dark are the page's
            choice; HTML by type: whatever else is put together with it is escaped
    facts   what the page says of a run, each thing computed once
    views   each answers one question, of every run or of one engine
    build   a run as a page, or a comparison of several
"""
