"""The report of runs as one HTML page: `read` what their folders hold, `page` puts it together.

Needs no torch, and no network when it is looked at.
"""
