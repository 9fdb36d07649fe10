//! Makes all-to-alls in which each pair of ranks has a length of its own, which only the two know
//! before the call.

use std::sync::Arc;

use peerlane_hal::ErrorKind;

use super::kept::{Kept, Prepared};
use super::memory::Memory;
use super::shape::invalid;
use super::sides::Placed;
use super::staging::{ALIGN_BYTES, Copy};
use super::{Immediate, Ready, When};
use crate::collective::Collective;
use crate::element::{DType, Untyped};
use crate::error::Error;
use crate::group::operation::{Intent, SendCounts, StartElements};
use crate::group::window::{Inner, Window};

/// The memory and the elements of a call whose arguments fit.
struct Checked {
    input: Memory,
    output: Memory,
    elements: StartElements,
}

impl Immediate<'_> {
    /// Exchanges the lengths of a call with splits, and finds or prepares its operation. Returns
    /// `None` if the call may exchange no messages.
    pub(super) fn ready_with_splits(
        &mut self,
        input: Option<Memory>,
        output: Option<Memory>,
        when: When,
    ) -> Result<Option<Ready>, Error> {
        if !self.may_exchange {
            return Ok(None);
        }

        let splits = self.splits.take().unwrap_or_default();
        let checked = self.check_splits(&splits, input, output, when);
        self.exchange_splits(&splits, checked, when).map(Some)
    }

    /// Takes part in a call with splits, and refuses it.
    pub(super) fn with_splits_refused(mut self, error: Error) -> Error {
        let refused = self.exchange_splits(&Default::default(), Err(error.clone()), When::OnHost);
        refused.err().unwrap_or(error)
    }

    fn check_splits(
        &self,
        splits: &[Vec<usize>; 2],
        input: Option<Memory>,
        output: Option<Memory>,
        when: When,
    ) -> Result<Checked, Error> {
        if self.collective != Collective::AllToAll || self.counts.is_some() {
            let article = self.collective.with_article();
            return Err(invalid(format!(
                "splits are given, expected none: only an all-to-all without counts has them, and this is {article}"
            )));
        }
        if when == When::Recorded {
            let text = "the stream captures a graph, expected one that runs its work at once: a call with splits cannot be \
                        recorded, because the host must know the lengths";
            return Err(invalid(text.to_owned()));
        }
        if self.group.setup.strict {
            let text = "strict is set, but a call with splits copies its input and output; prepare an \
                        all-to-all-v, or turn strict off";
            return Err(Error::new(ErrorKind::Unavailable, text));
        }

        let (Some(input), Some(output)) = (input, output) else {
            return Err(invalid(
                "an all-to-all has an input and an output, expected both".to_owned(),
            ));
        };
        output.check_elements(&input)?;
        if [&input, &output].into_iter().any(|memory| memory.location.window().is_some()) {
            let text = "an array is in a window, expected other memory: a call with splits copies its \
                        input and output; prepare an all-to-all-v over the window";
            return Err(invalid(text.to_owned()));
        }
        let ranks = self.group.ranks();
        for (name, lens, memory) in [("send", &splits[0], &input), ("receive", &splits[1], &output)]
        {
            let sum = lens.iter().try_fold(0_usize, |sum, len| sum.checked_add(*len));
            if lens.len() != ranks || sum != Some(memory.len) {
                return Err(invalid(format!(
                    "splits, {name}: {lens:?} for {} elements, expected {ranks} numbers with that sum",
                    memory.len
                )));
            }
        }

        let elements = StartElements { dtype: input.dtype, unit: input.unit };
        Ok(Checked { input, output, elements })
    }

    /// Exchanges the lengths of all ranks. A rank whose arguments do not fit takes part, so that
    /// all ranks return an error.
    fn exchange_splits(
        &mut self,
        splits: &[Vec<usize>; 2],
        checked: Result<Checked, Error>,
        when: When,
    ) -> Result<Ready, Error> {
        let mut bytes = 0;
        loop {
            let window = match self.group.immediate.staging.leased_window(bytes, false) {
                Some(window) => window,
                None => self.group.grow_lease(bytes, false)?,
            };
            if when != When::OnHost || window.is_on_device() {
                self.group.staging_engine()?;
            }
            let (operation, is_known) = self.all_to_all_v(&window)?;
            let mut prepared = operation.lock();
            let Prepared::AllToAllV(exchange) = &mut *prepared else {
                unreachable!("the map has such operations only")
            };
            exchange.set_timeout(self.timeout);
            exchange.set_beside_compute(self.beside_compute);
            let counts = SendCounts::new(&splits[0]).receive_counts(&splits[1]);
            let intent = match &checked {
                Err(error) => Intent::Refuse(error.clone()),
                Ok(checked) => {
                    exchange.set_elements(checked.elements);
                    if when == When::OnHost { Intent::StartOnHost } else { Intent::StartOnStream }
                }
            };

            let exchanged = exchange.exchange_counts(&counts, intent);
            // All ranks know the lengths of all, and so whether the memory must grow.
            let lacks = exchange.lacks_room().filter(|_| exchanged.is_err() && bytes == 0);
            drop(prepared);
            if let Some([input, output]) = lacks {
                bytes = input.max(output).saturating_add(ALIGN_BYTES).saturating_mul(2);
                continue;
            }
            exchanged?;

            let Checked { input, output, .. } = checked?;
            self.group.immediate.count(is_known, true);
            return Ok(Ready {
                operation,
                placed: placed(&window, &input, &output),
                is_staged: true,
            });
        }
    }

    /// Returns the operation over a window for copies, and whether it was prepared before.
    fn all_to_all_v(&mut self, window: &Arc<Inner>) -> Result<(Arc<Kept>, bool), Error> {
        if let Some(operation) = self.group.immediate.with_splits.find(&window.number) {
            return Ok((Arc::clone(operation), true));
        }

        let half = usize::try_from(half_bytes(window)).unwrap_or(usize::MAX);
        let over = Window::<Untyped>::over(Arc::clone(window));
        let builder = self.group.untyped_all_to_all_v(DType::U8, half, half);
        let builder = builder.output_into(&over, 0).input_from(&over, half);
        let exchange = builder.beside_compute_by_start().timeout(self.timeout).prepare()?;

        let operation = Kept::new(Prepared::AllToAllV(Box::new(exchange)));
        self.group.immediate.with_splits.insert(window.number, Arc::clone(&operation));
        Ok((operation, false))
    }
}

/// Returns the bytes of the output, which begins the window, and of the input behind it.
fn half_bytes(window: &Inner) -> u64 {
    let half = window.bytes() / 2;
    half - half % ALIGN_BYTES
}

fn placed(window: &Arc<Inner>, input: &Memory, output: &Memory) -> Placed {
    let copy = |memory: &Memory, offset: u64| Copy {
        caller: memory.location.address(),
        window: Arc::clone(window),
        offset,
        bytes: memory.bytes() as u64,
    };
    let (copy_in, copy_out) = (copy(input, half_bytes(window)), copy(output, 0));
    Placed {
        windows: [Some(Arc::clone(window)), Some(Arc::clone(window))],
        begins: [half_bytes(window), 0],
        copy_in: Some(copy_in),
        copy_out: Some(copy_out),
    }
}
