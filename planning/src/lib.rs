//! Simulates plans without hardware, for those who choose hardware or write schedules.
//!
//! Groups need none of this: they predict times with [`peerlane_collectives::cost`] when they prepare an operation.

pub mod simulate;
