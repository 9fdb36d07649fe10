//! The requests and responses between a rank and a peer's service, over TCP.
//!
//! A message is its length in four bytes, followed by that number of bytes. Each request has one response, in order.
//!
//! | request | fields | response |
//! | --- | --- | --- |
//! | hello | token of the fabric, rank and number of ranks of the sender | yes, or the reason of the refusal |
//! | import | generation and fields of a key | yes, or that the memory has been freed |
//! | open | the end of an engine's queue pair, its index and NIC, and the requested method of signals | the other end, and the method that is possible |
//! | close | the number of the primary queue pair at the receiver | yes, after it and the other queue pairs of its engine are closed |

use peerlane_hal::wire::{Reader, Writer};
use peerlane_hal::{Generation, KeyError, Rank};

use super::SignalBy;
use super::card::CARDS_MAX;
use super::ends::End;
use super::streams::{STRANDS_MAX, Strand};
use crate::key::Key;

/// The largest message in bytes.
pub(super) const MESSAGE_BYTES_MAX: usize = 4096;

const HELLO: u16 = 1;
const IMPORT: u16 = 2;
const OPEN: u16 = 3;
const CLOSE: u16 = 4;

/// A request of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Question {
    Hello { token: [u8; 16], rank: Rank, ranks: u32 },
    Import(Key),
    Open(Opening),
    Close { lead: u32 },
}

/// The request to open a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Opening {
    pub(crate) end: End,
    pub(crate) strand: Strand,
    /// The index of the NIC at the receiver of the request.
    pub(crate) card: u8,
    pub(crate) signal: Option<SignalBy>,
}

impl Question {
    pub(super) fn encode(&self) -> Vec<u8> {
        let writer = Writer::new();
        match self {
            Self::Hello { token, rank, ranks } => {
                writer.u16(HELLO).bytes(token).u32(rank.0).u32(*ranks).finish()
            }
            Self::Import(key) => key.write(writer.u16(IMPORT).u64(key.generation.0)).finish(),
            Self::Open(opening) => opening.write(writer.u16(OPEN)).finish(),
            Self::Close { lead } => writer.u16(CLOSE).u32(*lead).finish(),
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let mut reader = Reader::new(bytes);
        Ok(match reader.u16("question")? {
            HELLO => Self::Hello {
                token: reader.array("token")?,
                rank: Rank(reader.u32("rank")?),
                ranks: reader.u32("number of ranks")?,
            },
            IMPORT => {
                let generation = Generation(reader.u64("generation")?);
                Self::Import(Key::read(&mut reader, generation)?)
            }
            OPEN => Self::Open(Opening::read(&mut reader)?),
            CLOSE => Self::Close { lead: reader.u32("queue pair")? },
            seen => {
                let (field, wanted) = ("question", "1 to 4");
                return Err(KeyError::Field { field, found: seen.into(), expected: wanted });
            }
        })
    }
}

impl Opening {
    fn write(&self, writer: Writer) -> Writer {
        let Self { end, strand, card, signal } = self;
        // Numbers of queue pairs have 24 bits.
        let lead = strand.lead.unwrap_or(u32::MAX);
        end.write(writer)
            .u32(lead)
            .u16(strand.index.into())
            .u16((*card).into())
            .u16(signal_number(*signal))
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, KeyError> {
        let end = End::read(reader)?;
        let lead = Some(reader.u32("first queue pair")?).filter(|lead| *lead != u32::MAX);
        let index = reader.u16("strand")?;
        let card = reader.u16("card")?;
        let signal = signal_of(reader.u16("way of signals")?)?;
        let index_max = if lead.is_some() { STRANDS_MAX - 1 } else { 0 };
        if usize::from(index) > index_max || lead.is_some() && index == 0 {
            let (field, wanted) = ("strand", "0 for the first queue pair, 1 to 7 for the others");
            return Err(KeyError::Field { field, found: index.into(), expected: wanted });
        }
        if usize::from(card) >= CARDS_MAX {
            let (field, wanted) = ("card", "0 to 3");
            return Err(KeyError::Field { field, found: card.into(), expected: wanted });
        }
        // Both were just seen to be small.
        let strand = Strand { lead, index: index as u8 };
        Ok(Self { end, strand, card: card as u8, signal })
    }
}

/// A response to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Yes,
    /// The memory has been freed.
    Freed,
    /// The request was refused, with the reason.
    Refused(String),
    Opened {
        end: End,
        signal: SignalBy,
    },
}

impl Answer {
    pub(super) fn encode(&self) -> Vec<u8> {
        let writer = Writer::new();
        match self {
            Self::Yes => writer.u16(0).finish(),
            Self::Freed => writer.u16(1).finish(),
            Self::Refused(why) => {
                let why = &why.as_bytes()[..why.len().min(MESSAGE_BYTES_MAX / 2)];
                writer.u16(2).bytes(why).finish()
            }
            Self::Opened { end, signal } => {
                end.write(writer.u16(3)).u16(signal_number(Some(*signal))).finish()
            }
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let mut reader = Reader::new(bytes);
        Ok(match reader.u16("answer")? {
            0 => Self::Yes,
            1 => Self::Freed,
            2 => Self::Refused(String::from_utf8_lossy(reader.rest()).into_owned()),
            3 => Self::Opened {
                end: End::read(&mut reader)?,
                signal: signal_of(reader.u16("way of signals")?)?.unwrap_or(SignalBy::Message),
            },
            seen => {
                let (field, wanted) = ("answer", "0 to 3");
                return Err(KeyError::Field { field, found: seen.into(), expected: wanted });
            }
        })
    }
}

fn signal_number(signal: Option<SignalBy>) -> u16 {
    match signal {
        None => 0,
        Some(SignalBy::Message) => 1,
        Some(SignalBy::Write) => 2,
    }
}

fn signal_of(number: u16) -> Result<Option<SignalBy>, KeyError> {
    match number {
        0 => Ok(None),
        1 => Ok(Some(SignalBy::Message)),
        2 => Ok(Some(SignalBy::Write)),
        seen => {
            let (field, wanted) = ("way of signals", "0 to 2");
            Err(KeyError::Field { field, found: seen.into(), expected: wanted })
        }
    }
}

#[cfg(test)]
mod tests {
    use peerlane_hal::Role;

    use super::*;

    #[test]
    fn questions_and_answers_survive_the_wire() {
        let end = End { pair: 17, first: 1, gid: [3; 16], lid: 5, mtu: 3, reads: 16 };
        let key = Key {
            generation: Generation(5),
            rank: Rank(1),
            role: Role::Data,
            address: 4096,
            bytes: 77,
            cards: 1,
            remote_keys: [8, 0, 0, 0],
        };
        let lead = Strand { lead: None, index: 0 };
        let opening = Opening { end, strand: lead, card: 3, signal: Some(SignalBy::Write) };
        let other = Strand { lead: Some(17), index: 7 };
        let questions = [
            Question::Hello { token: [7; 16], rank: Rank(3), ranks: 5 },
            Question::Import(key),
            Question::Open(opening),
            Question::Open(Opening { strand: other, signal: None, ..opening }),
            Question::Close { lead: 3 },
        ];
        for question in questions {
            let bytes = question.encode();
            assert_eq!(Question::decode(&bytes), Ok(question));
            for length in 0..bytes.len() {
                Question::decode(&bytes[..length]).unwrap_err();
            }
        }
        for wrong in [
            Opening { strand: Strand { lead: None, index: 1 }, ..opening },
            Opening { strand: Strand { lead: Some(17), index: 0 }, ..opening },
            Opening { strand: Strand { lead: Some(17), index: 8 }, ..opening },
            Opening { card: 4, ..opening },
        ] {
            Question::decode(&Question::Open(wrong).encode()).unwrap_err();
        }
        let answers = [
            Answer::Yes,
            Answer::Freed,
            Answer::Refused("no".into()),
            Answer::Opened { end, signal: SignalBy::Message },
        ];
        for answer in answers {
            assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
        }
        Question::decode(&[9, 9]).unwrap_err();
        Answer::decode(&[9, 9]).unwrap_err();
    }
}
