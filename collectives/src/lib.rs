//! Collectives on copy engines, written once over `peerlane-hal`.

pub mod allgather;
pub mod bootstrap;
pub mod cost;
pub mod element;
pub mod error;
pub mod group;
pub mod layout;
pub mod plan;
mod run;
pub mod simulate;
pub mod staged;
pub mod topology;
pub mod trace;
pub mod verify;
mod window;
