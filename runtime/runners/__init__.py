"""Runners: what data flows through a model in each phase; how it is captured is a graph backend's matter."""
