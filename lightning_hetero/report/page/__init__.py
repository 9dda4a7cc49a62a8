"""A run's figures as one HTML file that needs nothing else (layer P).

    svg       marks on a drawing, colours by class, so that light and dark are the page's choice
    charts    time lines, bars, lines, heat maps, histograms
    views     of every run: each answers one question
    stages    ranks and stages of a step
    what_if   other engines, a mended rank, fewer cards
    engines   views of one engine: staleness, schedule, budget
    html      the page around them
    build     a run, or two, as a page
"""
