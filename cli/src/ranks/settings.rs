//! What all ranks must have been told alike.

use peerlane::bootstrap::Bootstrap;
use serde::{Deserialize, Serialize};

use super::circle::Circle;
use crate::error::{Failure, Result};

/// The options that shape a run, as people write them, and the seed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    options: Vec<(String, String)>,
    seed: u64,
}

impl Settings {
    /// Options by name, as this rank has them, and its seed.
    pub(crate) fn new(
        options: impl IntoIterator<Item = (&'static str, String)>,
        seed: Option<u64>,
    ) -> Self {
        let version = ("version", env!("CARGO_PKG_VERSION").to_owned());
        let options = std::iter::once(version).chain(options);
        Self {
            options: options.map(|(name, value)| (name.to_owned(), value)).collect(),
            seed: seed.unwrap_or_else(|| fastrand::u64(..)),
        }
    }

    /// Compares with all ranks and returns the seed of rank 0. Collective.
    ///
    /// # Errors
    /// If a rank was told otherwise: which, and what.
    pub(crate) fn agree(self, circle: &Circle) -> Result<u64> {
        let all = circle.share("settings", &self)?;
        for (rank, other) in all.iter().enumerate() {
            self.compare(circle.rank().index(), rank, other)?;
        }
        Ok(all.first().map_or(self.seed, |first| first.seed))
    }

    /// This rank's settings, `me`'s, with those of another rank.
    ///
    /// # Errors
    /// The first option that differs.
    pub(crate) fn compare(&self, me: usize, rank: usize, other: &Self) -> Result<()> {
        let pairs = self.options.iter().zip(&other.options);
        match pairs.into_iter().find(|(mine, theirs)| mine != theirs) {
            None => Ok(()),
            Some(((name, mine), (_, theirs))) => Err(Failure::failed(format!(
                "rank {rank} has {name} {theirs}, rank {me} has {mine}"
            ))
            .with_advice("start all ranks with the same program and the same options")),
        }
    }
}

/// An option as it is compared, where it may not be given.
pub(crate) fn given(value: Option<String>) -> String {
    value.unwrap_or_else(|| "nothing".to_owned())
}
