//! Defines backends that are broken on purpose, each in one rule.

mod engine;
mod fabric;
mod fused;

pub(crate) use engine::{EngineMutant, Fault};
pub(crate) use fabric::{FabricMutant, Flaw, with_flaw};
pub(crate) use fused::{FusedLayer, StartFault};
