"""From what a client sends to a `Grammar` that is harmless and compiles.

forms, tools    what the client sent, as a Grammar               in the router: cheap and bounded
weight, normal  how large a schema is; what of it constrains     in the router
checks          references, combinators, keywords, expressions   in the sandbox
job             the compile itself, and a few masks              in the sandbox, killed when it takes too long
compiler        asks the sandbox, remembers the answers          in the router
"""
