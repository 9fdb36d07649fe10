//! Keeps what immediate calls have prepared, for the next calls.

use std::collections::HashMap;
use std::hash::Hash;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::shape::Lens;
use crate::collective::Collective;
use crate::element::{DType, Operator, Untyped};
use crate::error::Error;
use crate::group::operation::{AllToAllV, UntypedOperation};

/// What two calls have in common that can use the same prepared operation.
///
/// It is equal on all ranks, so that all prepare and forget the same operations.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) collective: Collective,
    pub(super) dtype: DType,
    /// The operator of a reduction.
    pub(super) operator: Option<Operator>,
    pub(super) is_in_place: bool,
    pub(super) is_recorded: bool,
    pub(super) beside_compute: bool,
    /// The numbers of the windows of the input, unless in place, and of the output.
    pub(super) windows: [Option<u64>; 2],
    /// The longest lengths that the operation can be started with.
    pub(super) capacity: Lens,
}

/// The lengths and places of a call, in elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Start {
    pub(super) lens: Lens,
    pub(super) begins: [usize; 2],
}

/// An operation that calls share. The handle of a start has it too.
pub(super) struct Kept(Mutex<Prepared>);

pub(super) enum Prepared {
    Operation(Box<UntypedOperation>),
    AllToAllV(Box<AllToAllV<Untyped>>),
}

impl Kept {
    pub(super) fn new(prepared: Prepared) -> Arc<Self> {
        Arc::new(Self(Mutex::new(prepared)))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Prepared> {
        // An operation whose start has panicked waits for it in the next start.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Prepared {
    /// Waits until the starts have nothing left to do.
    pub(super) fn settle(&self) -> Result<(), Error> {
        match self {
            Self::Operation(operation) => operation.settle(),
            Self::AllToAllV(exchange) => exchange.settle(),
        }
    }
}

/// The operation that moves the data.
impl Deref for Prepared {
    type Target = UntypedOperation;

    fn deref(&self) -> &UntypedOperation {
        match self {
            Self::Operation(operation) => operation,
            Self::AllToAllV(exchange) => &exchange.data,
        }
    }
}

impl DerefMut for Prepared {
    fn deref_mut(&mut self) -> &mut UntypedOperation {
        match self {
            Self::Operation(operation) => operation,
            Self::AllToAllV(exchange) => &mut exchange.data,
        }
    }
}

/// A map of bounded size, which forgets the value that was not used for the longest time.
pub(super) struct RecentMap<K, V> {
    entries: HashMap<K, (V, u64)>,
    size_max: usize,
    /// Counts the uses.
    clock: u64,
}

impl<K: Clone + Eq + Hash, V> RecentMap<K, V> {
    pub(super) fn new(size_max: usize) -> Self {
        Self { entries: HashMap::new(), size_max, clock: 0 }
    }

    /// Returns the number of values.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the value of a key, which counts as a use.
    pub(super) fn find(&mut self, key: &K) -> Option<&mut V> {
        let (value, used) = self.entries.get_mut(key)?;
        self.clock += 1;
        *used = self.clock;
        Some(value)
    }

    /// Inserts a value, and returns the one that it has displaced.
    pub(super) fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.clock += 1;
        self.entries.insert(key, (value, self.clock));
        if self.entries.len() <= self.size_max {
            return None;
        }

        let oldest = self.entries.iter().min_by_key(|(_, (_, used))| *used);
        let oldest = oldest.map(|(key, _)| key.clone())?;
        self.entries.remove(&oldest).map(|(value, _)| value)
    }

    /// Removes the values whose keys fit, and returns them.
    pub(super) fn remove_where(&mut self, fits: impl Fn(&K) -> bool) -> Vec<V> {
        self.entries.extract_if(|key, _| fits(key)).map(|(_, (value, _))| value).collect()
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &K> {
        self.entries.keys()
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &V> {
        self.entries.values().map(|(value, _)| value)
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_that_was_used_first_is_displaced() {
        let mut map = RecentMap::new(2);
        assert_eq!(map.insert('a', 1), None);
        assert_eq!(map.insert('b', 2), None);
        assert_eq!(map.find(&'a'), Some(&mut 1));
        assert_eq!(map.insert('c', 3), Some(2));
        assert_eq!(map.find(&'b'), None);
        assert_eq!(map.insert('d', 4), Some(1));
        assert_eq!(map.len(), 2);
    }
}
