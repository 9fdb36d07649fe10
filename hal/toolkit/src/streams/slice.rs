//! Slices on their way: eager ones onto the streams, captured ones into a graph.

use peerlane_hal::Ticket;

use super::Engine;
use super::abilities::StreamDevice;
use super::back::{self, Part};
use super::emit::{Busy, Emitter};
use super::pending::Awaited;
use super::route::{Routes, Shape};
use super::step::Step;
use crate::device::StreamHandle;

impl<D: StreamDevice> Engine<D> {
    /// Puts the steps of an eager slice onto the streams.
    pub(super) fn emit(&mut self, shape: &Shape) -> Result<Ticket, D::Error> {
        let _entered = self.context.enter()?;
        let hardware = &mut *self.hardware;
        let main = self.forked.as_ref().map_or(hardware.main.raw(), |forked| forked.stream.raw());
        let last = self.pending.last();
        let elsewhere = self.last_main != main && self.pending.done() < last;
        let together = self.copies_together;
        self.routes.begin(shape, hardware.sides.len(), together);
        if elsewhere {
            // By the event and not by the stream, which need not live any more.
            hardware.tickets.order(&self.context, main)?;
        }
        let mut emitter = Emitter {
            context: &*self.context,
            main,
            sides: &mut hardware.sides,
            started: &hardware.started,
            marked: false,
            batch: &mut self.batch,
            copies: &mut self.copies,
            together,
            words: hardware.words.as_mut(),
            bounce: hardware.bounces.as_ref().map(|[eager, _]| eager),
            piece_bytes_max: self.abilities.piece_bytes_max,
            captured: false,
            busy: None,
            commands: [0; 2],
        };
        for awaited in awaited(&self.steps) {
            self.pending.await_flag(awaited);
        }
        emitter.begin();
        let back = self.own_copy.back(&self.abilities, shape, self.routes.peer_tracks(), false);
        back::mark(back, &self.steps, &mut self.parts);
        walk(&mut emitter, &self.steps, &self.parts, &mut self.routes)?;
        emitter.end()?;
        // With its event.
        let commands = emitter.commands() + 1;
        hardware.tickets.record(&self.context, last + 1, main)?;
        self.last_main = main;
        Ok(Ticket(self.pending.issue(commands)))
    }

    /// Records the steps of a slice on `main`, which captures.
    pub(super) fn record(
        &mut self,
        shape: &Shape,
        main: StreamHandle,
        sides: usize,
    ) -> Result<(), D::Error> {
        let hardware = &mut *self.hardware;
        let busy = match shape.waits {
            0 => None,
            waits => {
                let word = hardware.captures.busy_word(awaited(&self.steps))?;
                Some(Busy { word, waits, begun: false })
            }
        };
        let _entered = self.context.enter()?;
        hardware.captures.note_use();
        self.routes.begin(shape, sides, false);
        let (sides, started) = hardware.captures.sides(sides);
        let mut emitter = Emitter {
            context: &*self.context,
            main,
            sides,
            started,
            marked: false,
            batch: &mut self.batch,
            copies: &mut self.copies,
            together: false,
            words: hardware.words.as_mut(),
            bounce: hardware.bounces.as_ref().map(|[_, captured]| captured),
            piece_bytes_max: self.abilities.piece_bytes_max,
            captured: true,
            busy,
            commands: [0; 2],
        };
        emitter.begin();
        let back = self.own_copy.back(&self.abilities, shape, self.routes.peer_tracks(), true);
        back::mark(back, &self.steps, &mut self.parts);
        walk(&mut emitter, &self.steps, &self.parts, &mut self.routes)?;
        emitter.end()
    }
}

/// What the waits of a slice wait for.
fn awaited(steps: &[Step]) -> impl Iterator<Item = Awaited> + Clone {
    steps.iter().filter_map(|step| match *step {
        Step::Wait { flag, host, value, .. } => Some(Awaited { flag, host, value }),
        _ => None,
    })
}

fn walk<D: StreamDevice>(
    emitter: &mut Emitter<'_, D>,
    steps: &[Step],
    parts: &[Part],
    routes: &mut Routes,
) -> Result<(), D::Error> {
    steps.iter().zip(parts).try_for_each(|(step, part)| match (*step, *part) {
        (_, Part::Spared) => Ok(()),
        (Step::Copy { whom, dst, src, bytes, between, both_on_host }, part) => {
            let track = routes.track(whom);
            emitter.put((dst, src), (bytes, between, both_on_host), track)?;
            match part {
                // Behind it in the same stream.
                Part::Returns(own) => {
                    emitter.put((own, dst), (bytes, between, both_on_host), track)
                }
                _ => Ok(()),
            }
        }
        (Step::Signal { whom, flag, value }, _) => {
            emitter.signal(whom, routes.put_track(whom), (flag, value))
        }
        (Step::Wait { flag, value, reset, .. }, _) => emitter.wait(flag, value, reset),
    })
}
