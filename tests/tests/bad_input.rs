//! Bad input at whole groups: every rank gets an error with kind and text, and none hangs.
//!
//! What each rank says is compared literally; where a text holds something that differs from run to
//! run, a port or a generation, it is replaced by its name first. What the bootstraps alone refuse is
//! tested with them.

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
