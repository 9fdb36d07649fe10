//! Passes bad input to whole groups: every rank must return an error with kind and text, and none
//! may hang.
//!
//! The error of each rank is compared literally. A part that differs from run to run, such as a
//! port or a generation, is replaced by its name first. Input that the bootstraps refuse is tested
//! with the bootstraps.

mod ranks;

mod arguments;
mod disagreement;
mod endings;
mod keys;
mod missing;
mod shapes;
