"""How sphinx builds the site: `sphinx-build -W docs OUT`, with `pip install -e '.[docs]'`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "minitrain"
extensions = ["myst_parser", "sphinx_click", "extension"]
exclude_patterns = ["extension"]
html_theme = "furo"
html_static_path = ["style"]
html_css_files = ["pictures.css"]
html_title = "minitrain"
html_copy_source = False
html_show_copyright = False
nitpicky = True
myst_heading_anchors = 3
