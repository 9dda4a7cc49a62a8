"""Dark paper for pictures that are written by hand with colours for light paper in them."""

DARK = (
    '<style>@media (prefers-color-scheme:dark){text{fill:#e8ecef}text[fill="#555"]{fill:#9aa5ad}'
    'rect[fill="white"]{fill:#14181b}circle[fill="white"]{fill:#14181b}line[stroke="#ddd"]{stroke:#2b3238}'
    'line[stroke="#888"]{stroke:#76818a}line[stroke="black"]{stroke:#e8ecef}}</style>'
)
"""A line behind ``<svg ...>``."""
