//! The bytes that every rank contributes to one tensor.

use std::fmt;

use peerlane_hal::{ErrorKind, Rank};

use crate::error::Error;

/// The lengths of all pieces of one tensor in bytes. Equal lengths take no memory per rank.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Lengths(Kind);

#[derive(Clone, PartialEq, Eq, Hash)]
enum Kind {
    Equal {
        ranks: u32,
        bytes: u64,
    },
    /// The offset of each piece, and the end of the last one.
    Uneven(Box<[u64]>),
}

impl Lengths {
    /// Creates `ranks` pieces of `bytes` bytes.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no rank or more than fit in 32 bits, or the sum is more than
    /// 2^64 - 1.
    pub fn equal(ranks: usize, bytes: u64) -> Result<Self, Error> {
        let count = u32::try_from(ranks).ok().filter(|&ranks| ranks > 0);
        let count = count.ok_or_else(|| {
            invalid(format!("lengths of {ranks} ranks, expected 1 to {} ranks", u32::MAX))
        })?;
        if bytes.checked_mul(count.into()).is_none() {
            return Err(invalid(format!(
                "shard_bytes is {bytes} on each of {ranks} ranks, expected a sum of at most {}",
                u64::MAX
            )));
        }
        Ok(Self(Kind::Equal { ranks: count, bytes }))
    }

    /// Creates pieces of `bytes[r]` bytes of rank r.
    ///
    /// # Errors
    /// As [`equal`](Self::equal).
    pub fn of(bytes: &[u64]) -> Result<Self, Error> {
        let Some(&first) = bytes.first() else {
            let text = "shard_bytes is empty, expected one length for every rank";
            return Err(invalid(text.to_owned()));
        };
        let mut offsets = Vec::with_capacity(bytes.len() + 1);
        let mut end = 0_u64;
        for (rank, &bytes) in Rank::all(bytes.len()).zip(bytes) {
            offsets.push(end);
            end = end.checked_add(bytes).ok_or_else(|| {
                invalid(format!(
                    "shard_bytes of rank {rank} is {bytes}, behind {end} bytes of the ranks before \
                     it; expected a sum of at most {}",
                    u64::MAX
                ))
            })?;
        }
        if bytes.iter().all(|&bytes| bytes == first) {
            return Self::equal(bytes.len(), first);
        }
        offsets.push(end);
        Ok(Self(Kind::Uneven(offsets.into())))
    }

    /// Returns the number of ranks, at least 1.
    pub fn ranks(&self) -> usize {
        match &self.0 {
            Kind::Equal { ranks, .. } => *ranks as usize,
            Kind::Uneven(offsets) => offsets.len() - 1,
        }
    }

    /// Returns the length of all pieces, if they are equal.
    pub fn uniform(&self) -> Option<u64> {
        match self.0 {
            Kind::Equal { bytes, .. } => Some(bytes),
            Kind::Uneven(_) => None,
        }
    }

    /// Returns the length of the piece of `rank`.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn bytes(&self, rank: Rank) -> u64 {
        assert!(rank.index() < self.ranks(), "rank {rank} is not one of {} ranks", self.ranks());
        match &self.0 {
            Kind::Equal { bytes, .. } => *bytes,
            Kind::Uneven(offsets) => offsets[rank.index() + 1] - offsets[rank.index()],
        }
    }

    /// Returns the length of the pieces of all ranks before `rank`.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn offset(&self, rank: Rank) -> u64 {
        assert!(rank.index() < self.ranks(), "rank {rank} is not one of {} ranks", self.ranks());
        match &self.0 {
            Kind::Equal { bytes, .. } => bytes * u64::from(rank.0),
            Kind::Uneven(offsets) => offsets[rank.index()],
        }
    }

    /// Returns the length of all pieces together.
    pub fn total(&self) -> u64 {
        match &self.0 {
            Kind::Equal { ranks, bytes } => bytes * u64::from(*ranks),
            Kind::Uneven(offsets) => offsets[offsets.len() - 1],
        }
    }

    /// Returns the lengths in rank order.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        Rank::all(self.ranks()).map(|rank| self.bytes(rank))
    }

    /// Returns the bytes that every rank contributes to all of `tensors` together.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no tensor, they have different numbers of ranks, or the sum is
    /// more than 2^64 - 1.
    pub(super) fn sum(tensors: &[Self]) -> Result<Self, Error> {
        let [first, others @ ..] = tensors else {
            return Err(invalid("tensors is 0, expected at least 1".to_owned()));
        };
        let ranks = first.ranks();
        for (index, other) in (1..).zip(others) {
            if other.ranks() != ranks {
                return Err(invalid(format!(
                    "tensor {index} has lengths for {} ranks, tensor 0 for {ranks}",
                    other.ranks()
                )));
            }
        }
        let mut total = 0_u64;
        for (index, tensor) in tensors.iter().enumerate() {
            total = total.checked_add(tensor.total()).ok_or_else(|| {
                invalid(format!(
                    "tensor {index} has {} bytes, behind {total} bytes of the tensors before it; \
                     expected a sum of at most {}",
                    tensor.total(),
                    u64::MAX
                ))
            })?;
        }
        if let Some(bytes) = tensors.iter().map(Self::uniform).sum() {
            return Self::equal(ranks, bytes);
        }
        let of_rank = |rank| tensors.iter().map(|tensor| tensor.bytes(rank)).sum();
        Self::of(&Rank::all(ranks).map(of_rank).collect::<Vec<u64>>())
    }
}

impl fmt::Debug for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Equal { ranks, bytes } => write!(f, "{ranks} x {bytes}"),
            Kind::Uneven(_) => f.debug_list().entries(self.iter()).finish(),
        }
    }
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    #[test]
    fn equal_lengths_are_known_as_such() {
        let of = Lengths::of(&[7, 7, 7]).unwrap();
        assert_eq!(of, Lengths::equal(3, 7).unwrap());
        assert_eq!((of.uniform(), of.total(), of.offset(Rank(2))), (Some(7), 21, 14));
    }

    #[test]
    fn uneven_lengths_add_up() {
        let of = Lengths::of(&[3, 0, 5]).unwrap();
        assert_eq!((of.uniform(), of.total(), of.ranks()), (None, 8, 3));
        let pairs: Vec<_> = Rank::all(3).map(|rank| (of.offset(rank), of.bytes(rank))).collect();
        assert_eq!(pairs, [(0, 3), (3, 0), (3, 5)]);
        let sum = Lengths::sum(&[of, Lengths::equal(3, 2).unwrap()]).unwrap();
        assert_eq!(sum.iter().collect::<Vec<_>>(), [5, 2, 7]);
    }

    #[test]
    fn impossible_lengths_are_named() {
        let text = |result: Result<Lengths, Error>| {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            error.to_string()
        };
        assert_snapshot!(text(Lengths::equal(0, 1)), @"lengths of 0 ranks, expected 1 to 4294967295 ranks");
        assert_snapshot!(text(Lengths::equal(2, u64::MAX)), @"shard_bytes is 18446744073709551615 on each of 2 ranks, expected a sum of at most 18446744073709551615");
        assert_snapshot!(text(Lengths::sum(&[])), @"tensors is 0, expected at least 1");
        let (two, three) = (Lengths::equal(2, 8).unwrap(), Lengths::equal(3, 8).unwrap());
        assert_snapshot!(text(Lengths::sum(&[two.clone(), three])), @"tensor 1 has lengths for 3 ranks, tensor 0 for 2");
        let large = Lengths::equal(2, u64::MAX / 2).unwrap();
        assert_snapshot!(text(Lengths::sum(&[two, large])), @"tensor 1 has 18446744073709551614 bytes, behind 16 bytes of the tensors before it; expected a sum of at most 18446744073709551615");
    }
}
