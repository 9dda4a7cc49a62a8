"""A run's figures as one HTML file that needs nothing else (layer P).

    markup        HTML by type: whatever else is put together with it is escaped
    drawing       marks, colours by class, so that light and dark are the page's choice
    charts        time lines, bars, lines, heat maps
    facts         what the page says of a run, each thing computed once
    views         of every run: each answers one question
    engine_views  of one engine: its pipeline, its server, its budget; and of two runs
    build         a run, or two, as a page
"""
