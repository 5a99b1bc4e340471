"""A corpus of spoilt logs: whole arms of every kind of run, each changed as a bug of a stack, of a
harness or of a machine would change it, and the verdict that the judge must give.

A mutation is one line of a file in ``tests/mutations/tables/`` (each has a list ``MUTATIONS``; a
new file is found by itself): a name, the base that it changes (``bases.BASES``), the change
(``changes`` has ready ones), and which checkers must see it, with their verdicts::

    Mutation("a killed rank commits on", "drop-replica", commits_on("w2"), landing=FAIL),

The verdict over all checkers is the worst of those named, or worse. Checkers that are not named may
see it too; but for every registered checker there has to be a mutation that it alone sees
(``tests/harness/judge/test_mutations.py``), so that none could be taken away unnoticed. Put that
one first among those that name the checker: the test tries them in order. The site of the
documentation lists them all (``tests/mutations/page.py``).
"""
