"""The whole: settings, planner, topology, engine, tracing, command line.

The only folder that knows both the stages and the post office.
"""
