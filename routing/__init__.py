"""The post office of the runtime: errors, messages, mailboxes, sessions, actors, traces.

Nothing here knows what a tensor is; torch is never imported below this folder.
"""
