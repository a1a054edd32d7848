"""Sync: the files of a lab, to its server and back.

`scan` lists the files of a lab, `push` and `pull` transfer them by rsync or tar (`file_transfer`,
`tar_extraction`, `downloads`), `edits` protects what people changed on the server, `transfer_lock`
allows one transfer of a lab at a time, `containment` decides which names from a server may become
paths here. `starter` and `starter_update` merge the files that a course hands out into a lab.

May import: stores, servers and the layers below.
"""
