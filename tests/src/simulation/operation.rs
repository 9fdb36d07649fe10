//! One prepared all-gather with data that differs from start to start.

use peerlane_collectives::element::Element;
use peerlane_collectives::group::{AllGather, Group};
use peerlane_hal::Rank;

use super::memory::Guarded;
use super::{Scenario, failed};
use crate::data::{POISON, pattern};
use crate::failure::{Outcome, ensure_bytes};

pub(super) struct Operation<'s, T> {
    scenario: &'s Scenario,
    rank: Rank,
    number: usize,
    pub(super) gather: AllGather<T>,
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
                    // SAFETY: own memory outlives all ranks of the scenario, and is looked at again
                    // only after the group was closed.
                    let buffer = unsafe { group.register(own.elements::<T>()?) };
                    buffers.push(Some(buffer.map_err(failed)?));
                }
                let output = buffers.pop().flatten();
                [buffers.pop().flatten().filter(|_| !scenario.in_place), output]
            }
        };
        let mut builder = group.all_gather::<T>(scenario.shard_bytes / T::DTYPE.bytes());
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
        let shard = self.shard(self.rank, start);
        let output = self.gather.output_mut().map_err(failed)?;
        bytemuck::cast_slice_mut(output).fill(POISON);
        let input = self.gather.input_mut().map_err(failed)?;
        bytemuck::cast_slice_mut(input).copy_from_slice(&shard);
        Ok(())
    }

    /// Looks at every byte, and spoils them: what comes next must not depend on them.
    pub(super) fn check(&mut self, start: u64) -> Outcome {
        let wanted: Vec<u8> = Rank::all(self.scenario.ranks)
            .map(|rank| self.shard(rank, start))
            .collect::<Vec<_>>()
            .concat();
        let own = self.shard(self.rank, start);
        let output = self.gather.output().map_err(failed)?;
        let place = format!("operation {}, start {start}, output", self.number);
        ensure_bytes(place, bytemuck::cast_slice(output), &wanted)?;
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

    /// What `rank` contributes to `start`.
    fn shard(&self, rank: Rank, start: u64) -> Vec<u8> {
        let operation = (self.number as u64) << 56;
        let seed = self.scenario.seed ^ operation ^ (u64::from(rank.0) << 32) ^ start;
        // Neighbouring seeds must not give neighbouring data.
        pattern(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15), self.scenario.shard_bytes as u64)
    }
}
