"""The server's description of itself: /openapi.json and the page at /docs, see docs/server.md.

    endpoints.ENDPOINTS --app--> routes
                        --document--> /openapi.json --page_files/docs.js--> /docs

An endpoint is a row of one table, which the routes and the document both read.
"""
