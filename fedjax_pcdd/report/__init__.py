"""Reports over run folders: tables beside the papers' numbers, curves, one HTML page, and paired comparisons."""
