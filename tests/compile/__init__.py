"""Tests of the compile axis: the mark under Dynamo, passes, the backend, the grid."""
