//! Simulates plans of collectives and fits link rates to measurements, for users who choose hardware or write
//! schedules.
//!
//! Groups need none of this: they predict times with [`peerlane_collectives::cost`] when they prepare an operation.

mod fit;
pub mod simulate;

pub use fit::calibrate;
