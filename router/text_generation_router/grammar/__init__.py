"""From a client's grammar to a `Grammar` that compiles and that an engine can follow.

schema          places, references and size limits of a client's JSON schema; the refusals       in the router
forms, tools    the client's grammar or tools, also both, as a `Grammar`                          in the router
lark            rules of Lark                                                                     in the router
normalize       edits a schema: annotations and equivalent spellings                              in the router
translate       EBNF and structural tags to Lark                                                  in the sandbox
proof           checks, the compile itself and a few masks                                        in the sandbox
compiler        asks the sandbox and caches its answers                                           in the router

llguidance refuses unknown types, keywords and formats by name, and bounds the size of a grammar and the cost of a step.
`proof` checks only what it does not refuse: recursive references, large counts and steps, a schema that breaks the meta-schema.
"""
