"""Parts of the HTML report: tables, plots, and the SVG they are drawn with."""
