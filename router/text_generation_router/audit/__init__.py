"""Replay audits: a share of finished requests is computed again, with every shortcut off, and compared with what was served.

served     what a request got and used, recorded while it runs; finished ones are kept until they are replayed
verdict    served against replayed, a pure comparison; the feature that texts which differ have in common
records    a finding as a file, and a replay from it
auditor    chooses requests, runs replays while replicas are idle, reports findings
"""
