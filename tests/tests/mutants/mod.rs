//! Backends that are broken on purpose, one rule each.

mod engine;
mod fabric;

pub(crate) use engine::{EngineMutant, Fault};
pub(crate) use fabric::{FabricMutant, flaw};
