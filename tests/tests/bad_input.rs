//! Passes bad input to whole groups: every rank must return an error with kind and text, and none
//! may hang.
//!
//! The error of each rank is compared literally. A part that differs from run to run, such as a
//! port or a generation, is replaced by its name first. Input that the bootstraps refuse is tested
//! with the bootstraps.

#[path = "bad_input/ranks.rs"]
mod ranks;

#[path = "bad_input/arguments.rs"]
mod arguments;
#[path = "bad_input/disagreement.rs"]
mod disagreement;
#[path = "bad_input/endings.rs"]
mod endings;
#[path = "bad_input/keys.rs"]
mod keys;
#[path = "bad_input/missing.rs"]
mod missing;
#[path = "bad_input/shapes.rs"]
mod shapes;
