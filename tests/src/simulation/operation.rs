//! Prepares one all-gather, and fills and checks its memory with data that differs from start to
//! start.

use peerlane_collectives::element::{self, Element};
use peerlane_collectives::group::{self, Group};
use peerlane_hal::Rank;

use super::{Scenario, failed};
use peerlane_conformance::{Outcome, ensure_all, ensure_bytes};
use peerlane_conformance::{POISON, pattern};

pub(super) struct Operation<'s, T> {
    scenario: &'s Scenario,
    rank: Rank,
    number: usize,
    pub(super) gather: group::Operation<T>,
}

impl<'s, T: Element> Operation<'s, T> {
    /// Prepares operation `number` of the scenario, on the rank's own `memory` if there is any.
    pub(super) fn prepare(
        scenario: &'s Scenario,
        group: &mut Group,
        number: usize,
        memory: &mut [Guarded],
    ) -> Outcome<Self> {
        let rank = group.rank();
        let [input, output] = match memory.get_mut(2 * number..2 * number + 2) {
            None => [None, None],
            Some(pair) => {
                let mut buffers = Vec::new();
                for own in pair {
                    // SAFETY: own memory outlives all ranks of the scenario, and is read again only
                    // after the group was closed.
                    let buffer = unsafe { group.register(own.elements::<T>()?) };
                    buffers.push(Some(buffer.map_err(failed)?));
                }
                let output = buffers.pop().flatten();
                [buffers.pop().flatten().filter(|_| !scenario.in_place), output]
            }
        };
        let mut builder = group.all_gather::<T>(scenario.block_bytes / T::DTYPE.bytes());
        builder = builder.algorithm(scenario.algorithm).chunks(scenario.chunks);
        builder = if scenario.in_place { builder.in_place() } else { builder };
        builder =
            scenario.outputs.into_iter().fold(builder, |builder, count| builder.outputs(count));
        builder = input.into_iter().fold(builder, |builder, input| builder.input(input));
        builder = output.into_iter().fold(builder, |builder, output| builder.output(output));
        Ok(Self { scenario, rank, number, gather: builder.prepare().map_err(failed)? })
    }

    /// Poisons the output and fills the input for `start`.
    pub(super) fn fill(&mut self, start: u64) -> Outcome {
        let block = self.block(self.rank, start);
        let output = self.gather.output_mut().map_err(failed)?;
        bytemuck::cast_slice_mut(output).fill(POISON);
        let input = self.gather.input_mut().map_err(failed)?;
        bytemuck::cast_slice_mut(input).copy_from_slice(&block);
        Ok(())
    }

    /// Checks every byte, then overwrites them: the next start must not depend on them.
    pub(super) fn check(&mut self, start: u64) -> Outcome {
        let expected: Vec<u8> = Rank::all(self.scenario.ranks)
            .map(|rank| self.block(rank, start))
            .collect::<Vec<_>>()
            .concat();
        let own = self.block(self.rank, start);
        let output = self.gather.output().map_err(failed)?;
        let place = format!("operation {}, start {start}, output", self.number);
        ensure_bytes(place, bytemuck::cast_slice(output), &expected)?;
        if !self.scenario.in_place {
            let output = self.gather.output_mut().map_err(failed)?;
            bytemuck::cast_slice_mut(output).fill(!POISON);
        }
        let input = self.gather.input_mut().map_err(failed)?;
        let input = bytemuck::cast_slice_mut(input);
        let place = format!("operation {}, start {start}, own input", self.number);
        ensure_bytes(place, input, &own)?;
        input.fill(!POISON);
        Ok(())
    }

    /// Returns what `rank` contributes to `start`.
    fn block(&self, rank: Rank, start: u64) -> Vec<u8> {
        let operation = (self.number as u64) << 56;
        let seed = self.scenario.seed ^ operation ^ (u64::from(rank.0) << 32) ^ start;
        // Neighbouring seeds must not give neighbouring data.
        pattern(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15), self.scenario.block_bytes as u64)
    }
}

const GUARD: u8 = 0x5C;
const GUARD_BYTES: usize = 64;
const WORD_BYTES: usize = size_of::<u64>();

/// A span of own memory at any offset, with guard bytes in front and after it that must not change.
pub(super) struct Guarded {
    words: Vec<u64>,
    start: usize,
    bytes: usize,
}

impl Guarded {
    /// Creates `bytes` that start `offset` bytes after an aligned address.
    pub(super) fn new(bytes: usize, offset: usize) -> Self {
        let start = GUARD_BYTES + offset;
        let words = (start + bytes + GUARD_BYTES).div_ceil(WORD_BYTES);
        Self { words: vec![u64::from_ne_bytes([GUARD; WORD_BYTES]); words], start, bytes }
    }

    pub(super) fn elements<T: Element>(&mut self) -> Outcome<&mut [T]> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        element::cast_mut(&mut bytes[self.start..self.start + self.bytes]).map_err(failed)
    }

    pub(super) fn check(&self) -> Outcome {
        let bytes: &[u8] = bytemuck::cast_slice(&self.words);
        ensure_all("guard in front of the span", &bytes[..self.start], GUARD)?;
        ensure_all("guard after the span", &bytes[self.start + self.bytes..], GUARD)
    }
}
