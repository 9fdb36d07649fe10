//! Defines backends that are broken on purpose, each in one rule.

mod engine;
mod fabric;

pub(crate) use engine::{EngineMutant, Fault};
pub(crate) use fabric::{FabricMutant, Flaw, with_flaw};
