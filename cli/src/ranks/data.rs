//! Generates random test data for blocks, and compares received blocks with it.
//!
//! Every rank can generate the block of every rank, so the ranks have to agree only on the seed.
//! Outputs are filled with a known byte before an all-gather whose result is compared; a byte that
//! was never written is then visible.
//!
//! In a reduction, floating-point numbers are small integers, so that every order of additions
//! gives the same sum.

use std::fmt;

use fastrand::Rng;
use peerlane::collective::Collective;
use peerlane::{DType, Rank};

/// The number of bytes that are generated and compared at a time, a multiple of 8, so that pieces
/// yield the same bytes as one fill.
const CHUNK_BYTES: usize = 16 << 10;
/// The byte that fills an output before a checked operation.
pub(crate) const UNWRITTEN: u8 = 0xA5;

/// The random blocks of all ranks in one checked operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TestData {
    pub(crate) seed: u64,
    pub(crate) size: u64,
    pub(crate) round: u64,
}

/// A received byte that differs from the byte that its rank has sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    pub(crate) data: TestData,
    pub(crate) block: usize,
    pub(crate) offset: usize,
    pub(crate) expected: u8,
    pub(crate) found: u8,
}

/// Generates the test data of one block piece by piece, or compares a block with it.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    data: TestData,
    number: usize,
    content: Content,
    offset: usize,
}

#[derive(Clone, Debug)]
enum Content {
    Random(Rng),
    /// The sum of the numbers of all generators.
    Sum {
        generators: Vec<Rng>,
        dtype: DType,
        mask: u64,
    },
}

impl TestData {
    pub(crate) fn fill(&self, block: usize, bytes: &mut [u8]) {
        self.block(block).fill(bytes);
    }

    pub(crate) fn check(&self, block: usize, found: &[u8]) -> Result<(), Mismatch> {
        self.block(block).compare(found, &mut vec![0; CHUNK_BYTES.min(found.len())])
    }

    /// Returns the test data of a block, to be generated or compared piece by piece.
    ///
    /// With several tensors, the pieces of all ranks are numbered tensor by tensor.
    pub(crate) fn block(&self, number: usize) -> Block {
        let content = Content::Random(self.generator(number));
        Block { data: *self, number, content, offset: 0 }
    }

    /// Returns the sum of the contributions with these numbers.
    fn sum(&self, numbers: impl Iterator<Item = usize>, dtype: DType, ranks: usize) -> Block {
        let generators = numbers.map(|number| self.generator(number)).collect();
        let content = Content::Sum { generators, dtype, mask: mask(dtype, ranks) };
        Block { data: *self, number: 0, content, offset: 0 }
    }

    /// Returns the generator of the bytes of a block.
    ///
    /// The bytes of neighbouring blocks are unrelated, because each number is mixed in by a
    /// generator of its own.
    fn generator(&self, block: usize) -> Rng {
        [self.size, self.round, block as u64]
            .into_iter()
            .fold(Rng::with_seed(self.seed), |mut generator, number| {
                Rng::with_seed(generator.u64(..) ^ number)
            })
    }
}

impl Block {
    /// The number that divides the length of every piece except the last.
    pub(crate) const PIECE_BYTES: usize = CHUNK_BYTES;

    pub(crate) fn fill(&mut self, piece: &mut [u8]) {
        self.content.fill(piece);
        self.offset += piece.len();
    }

    /// Compares the next bytes of the block; `scratch` has at least the length of a chunk or of
    /// `found`.
    pub(crate) fn compare(&mut self, found: &[u8], scratch: &mut [u8]) -> Result<(), Mismatch> {
        for found in found.chunks(CHUNK_BYTES) {
            let expected = &mut scratch[..found.len()];
            self.content.fill(expected);
            if *expected != *found {
                return Err(self.mismatch(expected, found));
            }
            self.offset += found.len();
        }
        Ok(())
    }

    fn mismatch(&self, expected: &[u8], found: &[u8]) -> Mismatch {
        let at =
            expected.iter().zip(found).position(|(expected, found)| expected != found).unwrap_or(0);
        let (expected, found) = (expected[at], found[at]);

        let Self { data, number, offset, .. } = self;
        Mismatch { data: *data, block: *number, offset: offset + at, expected, found }
    }
}

impl Content {
    fn fill(&mut self, piece: &mut [u8]) {
        match self {
            Self::Random(generator) => generator.fill(piece),
            Self::Sum { generators, dtype, mask } => {
                for element in piece.chunks_exact_mut(dtype.bytes()) {
                    let values = generators.iter_mut().map(|generator| generator.u64(..) & *mask);
                    // A sum of 64 bits has the low bytes of the sum of every shorter integer type.
                    let sum = values.fold(0, u64::wrapping_add);
                    element.copy_from_slice(&encode(*dtype, sum)[..dtype.bytes()]);
                }
            }
        }
    }
}

/// A floating-point type that can be reduced.
struct FloatType {
    dtype: DType,
    /// The number up to which all integers are exact.
    exact_max: u64,
    /// Returns the bits of a small integer.
    encode: fn(u64) -> u64,
}

const FLOATS: [FloatType; 4] = [
    FloatType {
        dtype: DType::Bf16,
        exact_max: 1 << 8,
        encode: |value| u64::from((value as f32).to_bits() >> 16),
    },
    FloatType { dtype: DType::F16, exact_max: 1 << 11, encode: half_bits },
    FloatType {
        dtype: DType::F32,
        exact_max: 1 << 24,
        encode: |value| (value as f32).to_bits().into(),
    },
    FloatType { dtype: DType::F64, exact_max: 1 << 24, encode: |value| (value as f64).to_bits() },
];

fn half_bits(value: u64) -> u64 {
    let Some(exponent) = value.checked_ilog2().map(u64::from) else { return 0 };
    // The bias of the exponent is 15, and the leading one of the number is not stored.
    (15 + exponent) << 10 | (value << 10 >> exponent) & 0x3ff
}

fn float_type(dtype: DType) -> Option<&'static FloatType> {
    FLOATS.iter().find(|float| float.dtype == dtype)
}

/// Returns the mask of the random bits of an element. It keeps floating-point numbers so small that
/// the sum over all ranks is exact.
fn mask(dtype: DType, ranks: usize) -> u64 {
    let Some(float) = float_type(dtype) else { return u64::MAX };
    [7, 3, 1].into_iter().find(|mask| mask * ranks as u64 <= float.exact_max).unwrap_or(0)
}

/// Returns the bytes of an element, whose value is a small integer if it is a floating-point
/// number.
fn encode(dtype: DType, value: u64) -> [u8; 8] {
    float_type(dtype).map_or(value, |float| (float.encode)(value)).to_le_bytes()
}

/// Assigns test data to the blocks that a rank sends and receives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbering {
    pub(crate) collective: Collective,
    pub(crate) dtype: DType,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
}

impl Numbering {
    /// Returns the test data of an input block, by tensor or by receiving rank.
    pub(crate) fn input(&self, data: TestData, index: usize) -> Block {
        let number = match self.collective.has_input_block_per_receiver() {
            true => self.rank * self.ranks + index,
            false => index * self.ranks + self.rank,
        };

        match self.collective.is_reduction() {
            true => data.sum([number].into_iter(), self.dtype, self.ranks),
            false => data.block(number),
        }
    }

    /// Returns the test data of an output block, which is counted by tensor and then by rank.
    pub(crate) fn output(&self, data: TestData, index: usize) -> Block {
        data.block(match self.collective.has_equal_outputs() {
            true => index,
            false => index * self.ranks + self.rank,
        })
    }

    /// Returns the whole output of a reduction, or `None` if each block of an output is from one
    /// rank.
    pub(crate) fn sum(&self, data: TestData) -> Option<Block> {
        let Self { collective, dtype, rank, ranks } = *self;
        let number = |from: usize| match collective.has_input_block_per_receiver() {
            true => from * ranks + rank,
            false => from,
        };

        // Every rank that adds to a block of the output has the same contributors.
        let adder = (0..ranks).map(Rank::at).find(|&it| collective.requires(it, Rank::at(rank)));
        let contributes =
            |from: &usize| adder.is_some_and(|it| collective.contributes(Rank::at(*from), it));
        let contributors = (0..ranks).filter(contributes);

        collective.is_reduction().then(|| data.sum(contributors.map(number), dtype, ranks))
    }
}

/// Overwrites an output with a known byte before a checked run.
pub(crate) fn overwrite(output: &mut [u8]) {
    output.fill(UNWRITTEN);
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { data, block, offset, expected, found } = self;
        write!(
            f,
            "block {block}, offset {offset}: found {found:#04x}, expected {expected:#04x}{} (--seed {}, \
             check {})",
            if *found == UNWRITTEN {
                "; the found value marks bytes that were never written"
            } else {
                ""
            },
            data.seed,
            data.round
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(data: TestData, output: &[u8], ranks: usize) -> Result<(), Mismatch> {
        let bytes = output.len() / ranks;
        (0..ranks).try_for_each(|rank| data.check(rank, &output[rank * bytes..][..bytes]))
    }

    fn gathered(data: TestData, ranks: usize, block_bytes: usize) -> Vec<u8> {
        let mut output = vec![0; ranks * block_bytes];
        for (rank, block) in output.chunks_exact_mut(block_bytes.max(1)).enumerate() {
            data.fill(rank, block);
        }
        output
    }

    #[test]
    fn a_correct_output_passes_at_odd_sizes() {
        let data = TestData { seed: 1, size: 2, round: 3 };
        for block_bytes in [0, 1, 7, 8, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1] {
            for ranks in [1, 2, 5] {
                let output = gathered(data, ranks, block_bytes);
                assert_eq!(
                    check(data, &output, ranks),
                    Ok(()),
                    "{ranks} ranks, {block_bytes} bytes"
                );
            }
        }
    }

    #[test]
    fn one_wrong_bit_is_detected_at_its_offset() {
        let data = TestData { seed: 9, size: 0, round: 0 };
        let mut rng = Rng::with_seed(4);
        for _ in 0..200 {
            let mut output = gathered(data, 3, CHUNK_BYTES + 5);
            let at = rng.usize(..output.len());
            let expected = output[at];
            output[at] ^= 1 << rng.u32(..8);
            let mismatch = check(data, &output, 3).unwrap_err();
            assert_eq!(mismatch.block * (CHUNK_BYTES + 5) + mismatch.offset, at);
            assert_eq!((mismatch.expected, mismatch.found), (expected, output[at]));
        }
    }

    #[test]
    fn the_data_of_another_rank_round_size_or_seed_is_wrong() {
        let data = TestData { seed: 5, size: 1, round: 1 };
        let output = gathered(data, 2, 64);
        for other in [
            TestData { seed: 6, ..data },
            TestData { size: 2, ..data },
            TestData { size: 0, round: 0, ..data },
            TestData { round: 2, ..data },
        ] {
            assert!(check(other, &output, 2).is_err(), "{other:?}");
        }
        let (left, right) = output.split_at(64);
        assert!(check(data, &[right, left].concat(), 2).is_err());
    }

    #[test]
    fn a_mismatch_has_its_offset_and_shows_unwritten_bytes() {
        let data = TestData { seed: 7, size: 0, round: 1 };
        let mut output = gathered(data, 2, 32);
        output[40] = 0x11;
        insta::assert_snapshot!(check(data, &output, 2).unwrap_err(), @"block 1, offset 8: found 0x11, expected 0x3c (--seed 7, check 1)");
        overwrite(&mut output[32..]);
        insta::assert_snapshot!(check(data, &output, 2).unwrap_err(), @"block 1, offset 0: found 0xa5, expected 0xb9; the found value marks bytes that were never written (--seed 7, check 1)");
    }
}
