//! Changes the commands of a lane to those of a fused start.

use std::ops::Range;

use peerlane_hal::{Command, Commands, Direction, Rank, RegionOffset, Rows};

use crate::layout::Layout;
use crate::plan::{Cell, Plan, Source};
use crate::run::buffers::{BufferId, CROSS_TIER_FLAGS, INBOX};
use crate::run::program::Program;

/// Where the data of fused starts is until its receiver uses it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inboxes {
    /// The distance of the blocks of consecutive ranks in an inbox, if peers put their blocks there
    /// and not into the output.
    pub(crate) stride_bytes: Option<u64>,
    /// By how much an inbox is longer than its data.
    pub(crate) factor: u64,
}

impl Program {
    /// Changes the commands of a plan to those of fused starts with such inboxes.
    pub(crate) fn fuse(&mut self, plan: &Plan, layout: &Layout, inboxes: Inboxes) {
        if let Some(stride_bytes) = inboxes.stride_bytes {
            self.stage(plan, layout, stride_bytes);
        }

        let lengthen = |place: &mut RegionOffset| {
            if place.region == INBOX {
                place.offset *= inboxes.factor;
            }
        };
        for command in &mut self.commands {
            if let Command::Copy { remote, local, .. } = command {
                lengthen(remote);
                lengthen(local);
            }
        }
        self.sources.iter_mut().for_each(lengthen);
        self.launched = launched(&self.commands);
    }

    /// Returns the commands that the launch of a fused start runs.
    pub(crate) fn launched_commands(&self) -> Commands<'_> {
        let commands = &self.commands[self.launched.clone()];
        Commands { commands, sources: &self.sources }
    }

    /// Has the puts go to the inboxes of peers instead of their outputs. In the end, the blocks of
    /// peers are copied from the inbox of this rank to its output.
    fn stage(&mut self, plan: &Plan, layout: &Layout, stride_bytes: u64) {
        let me = plan.rank;
        let place = |of: Rank| {
            let offset = stride_bytes.saturating_mul(of.0.into());
            RegionOffset { region: INBOX, offset }
        };

        let mut commands = self.commands.to_vec();
        // In place, the own block is where it belongs.
        let is_own =
            |command: &Command| matches!(*command, Command::Copy { peer, .. } if peer == me);
        commands.retain(|command| !(plan.in_place && is_own(command)));
        for command in &mut commands {
            match command {
                Command::Copy { peer, remote, .. } if *peer != me => *remote = place(me),
                _ => {}
            }
        }

        let arrives = |from: &Rank| *from != me && plan.collective.requires(*from, me);
        for from in Rank::all(layout.ranks()).filter(arrives) {
            let cell = Cell { block: from, chunk: 0 };
            let spans = layout.spans(cell, (from, Source::Output), me);
            commands.extend(spans.map(|span| {
                let region = BufferId::Output(span.dst.buffer).region();
                let remote = RegionOffset { region, offset: span.dst.offset };
                let (direction, local, rows) = (Direction::Put, place(from), Rows::ONE);
                Command::Copy { direction, peer: me, remote, local, bytes: span.bytes, rows }
            }));
        }
        self.commands = commands.into();
    }
}

/// Returns the commands between the first and the last flags that lanes of two tiers share.
///
/// Such a flag is one word, which an engine of the network signals or awaits, and not one for each
/// block of a launch. Streams wait for it, so that a launch keeps no compute units meanwhile.
fn launched(commands: &[Command]) -> Range<usize> {
    let first = commands.iter().take_while(|command| crosses_tiers(command)).count();
    let last = commands[first..].iter().rev().take_while(|command| crosses_tiers(command)).count();
    first..commands.len() - last
}

/// Returns whether a command signals or awaits a flag that lanes of two tiers share.
pub(crate) fn crosses_tiers(command: &Command) -> bool {
    match command {
        Command::Signal { flag, .. } | Command::Wait { flag } => flag.region == CROSS_TIER_FLAGS,
        Command::Copy { .. } | Command::Reduce { .. } => false,
    }
}
