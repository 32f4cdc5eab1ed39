"""Graph backends: how a runner's forward is captured; they do not know what data flows through it."""
