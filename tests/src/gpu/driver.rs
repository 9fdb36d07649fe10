//! On which driver the tests of a backend for GPUs run.

use std::path::Path;

use super::{ErrorOf, Gpu};

/// A driver that tests run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuDriver {
    /// The vendor's, on GPUs.
    Device,
    /// The simulated one of this repository.
    Simulated,
}

impl GpuDriver {
    /// What the environment asks for, or what there is. The simulated driver is loaded here, before
    /// anybody asks for the real one; a test program calls it first thing.
    ///
    /// # Panics
    /// For an unknown choice, or if the simulated driver cannot be loaded: then no test can run.
    pub fn load<G: Gpu>() -> Self {
        let driver = match std::env::var(G::CHOICE).as_deref() {
            Ok("device") => Self::Device,
            Ok("simulated") => Self::Simulated,
            Ok(other) => {
                panic!("{} is {other:?}, wanted \"device\" or \"simulated\"", G::CHOICE)
            }
            Err(_) if Path::new(G::KERNEL_DEVICE).exists() => Self::Device,
            Err(_) => Self::Simulated,
        };
        if driver == Self::Simulated {
            G::simulate();
        }
        driver
    }

    /// The word of the environment for it.
    pub fn choice(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Simulated => "simulated",
        }
    }

    /// The first part of every check's name.
    pub fn name<G: Gpu>(self) -> String {
        match self {
            Self::Device => G::NAME.to_owned(),
            Self::Simulated => format!("{}-simulated", G::NAME),
        }
    }

    /// How many devices it has.
    ///
    /// # Errors
    /// If there is none.
    pub fn devices<G: Gpu>(self) -> Result<u32, ErrorOf<G>> {
        Ok(u32::try_from(G::count()?.max(1)).unwrap_or(u32::MAX))
    }
}
