"""Runners: what data flows through a model in each kind of forward; how it is captured is a graph backend's matter."""
