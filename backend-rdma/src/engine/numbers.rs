//! Encodes signals: first by registration and word, later by a short flag id and an increment.

use std::collections::HashMap;

use super::pair::Announcement;
use crate::fabric::{Immediate, MESSAGE_BYTES, Message, NUMBERS_MAX, STEP_MAX};

/// Flags that the peer knows by a flag id, and their last values.
#[derive(Debug, Default)]
pub(super) struct Numbers(HashMap<(u64, u64), (u32, u64)>);

impl Numbers {
    /// Returns the immediate of a flag whose id the peer knows, if the increment is small enough.
    pub(super) fn immediate(&mut self, signal: &Announcement, companions: u32) -> Option<u32> {
        let (number, known) = self.0.get_mut(&(signal.generation, signal.word))?;
        let step = signal.value.checked_sub(*known).filter(|step| (1..=STEP_MAX).contains(step))?;
        *known = signal.value;
        Some(Immediate::Step { number: *number, step, companions }.encode())
    }

    /// Returns the full message, which gives the flag an id while ids are left.
    pub(super) fn message(
        &mut self,
        signal: &Announcement,
        companions: u32,
    ) -> [u8; MESSAGE_BYTES] {
        let Announcement { generation, word, value, .. } = *signal;
        let fresh = self.0.len() as u32;
        let number = match self.0.get_mut(&(generation, word)) {
            Some((number, known)) => {
                *known = value;
                *number
            }
            None if fresh < NUMBERS_MAX => {
                self.0.insert((generation, word), (fresh, value));
                fresh
            }
            None => u32::MAX,
        };
        Message { generation, word, value, number, companions }.encode()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_small_step_of_a_known_flag_fits_an_immediate() {
        let mut numbers = Numbers::default();
        let signal = |word, value| Announcement { generation: 3, word, value, address: 0, key: 0 };
        assert_eq!(numbers.immediate(&signal(0, 1), 0), None, "it is not known yet");
        numbers.message(&signal(0, 1), 0);
        let step = |number, step| Immediate::Step { number, step, companions: 5 }.encode();
        assert_eq!(numbers.immediate(&signal(0, 1 + STEP_MAX), 5), Some(step(0, STEP_MAX)));
        assert_eq!(numbers.immediate(&signal(0, 2 + 2 * STEP_MAX), 5), None, "the step is large");
        assert_eq!(numbers.immediate(&signal(0, 1 + STEP_MAX), 5), None, "there is no step");
        numbers.message(&signal(1, 7), 0);
        assert_eq!(numbers.immediate(&signal(1, 8), 5), Some(step(1, 1)));
    }
}
