# ruff: noqa: E501  (the templates are prose: one wording a line)
"""Own texts: networking and mixture-of-experts topics in plain English, many wordings of each fact."""

from grammar import parse_topics

TOPICS = parse_topics("""
# TCP 2 6
? {What is|Explain|Describe|Tell me about} TCP{| in simple words| in a few sentences}{.|?}
? How does TCP {work|send data|deliver data}?
? What {does TCP do|is TCP good for}?
? {When should I|Why do programs} use TCP?
TCP is {a protocol|a set of rules|the usual way} {for sending|to send|that carries} {a stream of bytes|data} {between|from one to the other of} two {computers|programs|machines}.
TCP, the Transmission Control Protocol, {carries|moves|delivers} {data|bytes} between two {programs|computers} {and makes sure|so} that nothing is {missing|lost}.
{The job of TCP is|TCP has one job:} to {bring|carry|deliver} {all the bytes|every byte|the data} to the other {side|computer} {complete and in order|in the right order}.
-
{Before any data is sent|First of all|At the start}, {the two sides|both computers|client and server} {open|set up|agree on} a connection.
{It opens|TCP first opens|The sender first opens} a connection {with a short exchange of messages|with a handshake|and waits for the answer}.
{The client asks for|One side asks for} a connection, {the server agrees|the other side says yes}, and only then {the data follows|the first byte is sent}.
-
{Every byte has|Each byte gets|TCP gives each byte} a {number|sequence number}, so the {receiver|other side} can {put the parts in order|sort the parts|see what is missing}.
{The parts are numbered|All parts carry numbers}, and the {receiver|other side} {uses the numbers to put|puts} them {together|back} in the right order.
{If packets arrive|When the parts come} out of order, {TCP sorts them|they are sorted} before the program {sees|reads} them.
-
{The receiver|The other side} {confirms|acknowledges} what it {got|has received}, and {what is not confirmed|what got lost} is sent {again|once more|a second time}.
{If|When} a packet {is lost|gets lost|does not arrive}, the sender {notices it|sees that no answer comes} and {sends it again|repeats it}.
{The sender waits for|TCP waits for} a confirmation; {when none comes in time|without one}, it {repeats|resends} the {data|packet|missing part}.
-
TCP also {looks after|controls|watches} the speed: it {slows down|sends less} when the {network|line} is {busy|full|crowded}.
{When the network is busy|When packets are lost}, TCP {sends more slowly|slows down}, and {when it is free|later} it {speeds up|sends faster} again.
The receiver {says|tells the sender} how much it can {take|hold}, so a fast sender does not {flood|drown} a slow {receiver|computer}.
-
{Web pages, mail and files|Mail, files and web pages|Files and web pages} {are sent with|use|need} TCP, because {a missing part would spoil them|they must be complete|every byte counts}.
{You use TCP|TCP is used|Choose TCP} {whenever|when} {all the data must arrive|the data must be complete|nothing may be missing}, {for example for a download|as with a web page|for example for mail}.
{A file|A program|A picture} with a {missing part|hole} is {useless|of no use}, {so it is sent with|and that is why we use} TCP.
-
{The price is|This costs} {some time|a little time|extra time}: {every confirmation takes|waiting for answers takes} {a while|a moment}.
{All this care|This} makes TCP {a little slower|slower} than {simpler protocols|UDP}.

# UDP 2 6
? {What is|Explain|Describe|Tell me about} UDP{| in simple words| in a few sentences}{.|?}
? How does UDP {work|send data|deliver data}?
? What {does UDP do|is UDP good for}?
? {When should I|Why do games|Why do calls} use UDP?
UDP is {a simple protocol|a simple way|a set of rules} {for sending|to send|that sends} {single messages|single packets|short messages} {between|from one to the other of} two {computers|programs|machines}.
UDP, the User Datagram Protocol, {sends|carries} {single packets|single messages|datagrams} {without asking first|without a connection|and does little else}.
{The idea of UDP is|UDP is|The job of UDP is} simple: {a program hands over a message|one message goes in}, and {the message is sent at once|it goes out at once}.
-
{There is no|It needs no|UDP has no} {connection|handshake}: {the first packet|the first message} {already carries data|can carry data}.
{It does not|UDP does not} {open|set up} a connection {first|before it sends}, so {no time is lost|the first message goes out at once}.
{The sender does not|Nobody has to} {ask|wait} {first|before sending}; {the packet just goes out|the message is simply sent}.
-
{A packet may|A message may|Some packets} {get lost|be lost}, and UDP does {not notice|nothing about it|not send it again}.
{Nobody checks|UDP does not check} {whether|if} a packet {arrives|has arrived}, {and lost packets are|so a lost packet is} not {repeated|sent again}.
{Lost packets|Packets that get lost} are {gone|not repeated}; {the program itself|the program} must {deal with that|live with that}.
-
{Packets may|Messages may|The packets can} {arrive|come} {out of order|in another order|in a different order}{|, or even twice}.
{The order|The order of the packets} is not {kept|guaranteed}: {the second|a later} {packet|message} may {come|arrive} before the first{| one}.
-
{The header is|Its header is|A UDP header is} {short|small|only eight bytes long}: two ports, a length and a checksum.
{It adds only|UDP adds only} two ports, a length and a checksum to {the data|each message|each packet}.
-
{Calls, games and live video|Games and calls|Voice calls and games|Live video and games} use UDP, because {a late packet is of no use|speed matters more than a lost packet|they cannot wait}.
{UDP is used|You use UDP|Choose UDP} {when|where} {speed matters|time matters} more than {a lost packet|a few lost packets}, {for example in a call|as in a game|for example in live video}.
{In a call|In a voice call|In a video call}, {a lost packet|one lost packet} is {only a small noise|hardly heard}, but {a long wait|a pause} is {annoying|bad}.
{A game|A computer game} sends the {place|position} of {a player|each player} many times a second, so {one lost message|a lost packet} does {no harm|not matter}.
-
{DNS|The name service DNS} uses UDP too, because {a question and its answer|one question and one answer} fit into {one packet each|single packets}.
{Short questions|Short requests}, {such as those to DNS|as in DNS}, {also use|are sent with} UDP{|, because they fit into one packet}.

# TCP and UDP 3 7
? {What is the difference|What are the differences|Explain the difference} between TCP and UDP{|, in simple words}?
? {How do TCP and UDP differ|TCP or UDP|TCP vs UDP|Which is better, TCP or UDP}?
? {Compare|Explain} TCP and UDP{| in simple words}.
{TCP and UDP are|Both TCP and UDP are} {two ways|protocols} to send data {over a network|between programs|over the internet}, but they {work differently|make different promises}.
{The main difference is|The short answer:} {that TCP is|TCP is} {reliable|careful} and UDP is {fast|quick|simple}.
{Both protocols|Both} {carry data|send data} {between|from one program to another, between} two {computers|machines}, but {only TCP|TCP alone} {promises|makes sure} that it {arrives|comes complete}.
TCP {is careful|takes care} and UDP {is quick|is in a hurry}: that is {the main difference|the difference in one sentence}.
-
TCP {opens|sets up|makes} a connection {first|before it sends data}, {while|but} UDP {sends at once|just sends|sends its packets without one}.
{With TCP|In TCP}, {the two sides|both sides} {first agree|must first agree} {to talk|on a connection}; {with UDP|in UDP}, {the first packet goes out at once|there is no such step}.
-
TCP {numbers|counts} {the bytes|every byte}, {waits for|expects} {confirmations|answers} and {sends lost data again|repeats what got lost}. UDP {does none of this|does not}.
{If a packet is lost|When a packet gets lost}, TCP {sends it again|repeats it}, {while UDP|but UDP} {does not notice|goes on as if nothing had happened}.
{With TCP, nothing is lost|TCP repeats lost packets}; {with UDP, a packet may be lost|UDP does not}, and {the program must cope|nobody repeats it}.
-
TCP {keeps|guarantees} the order {of the bytes|of the data}, {while|but} UDP {packets|messages} may {come|arrive} {in any order|out of order}.
{The data of TCP|With TCP the data} {arrives|comes} in order{, and|;} {with UDP|in UDP} the order may {change|be lost}.
-
{For TCP the data is|TCP gives the program} a {stream|long stream} of bytes, {and for UDP it is|while UDP gives it} {single messages|separate messages}.
-
UDP {is faster|has less delay|needs less time}, because it {waits for nothing|does not wait for answers|has no handshake}.
{TCP is a little slower|TCP needs more time}, because {it waits for answers|a lost packet holds up everything behind it|it must confirm every part}.
-
{Use TCP|TCP is used|TCP is the right choice} for {web pages, mail and files|files and mail|web pages and downloads}, {where|because} {every byte counts|nothing may be missing|the data must be complete}.
{A file|A web page|A letter} must {be complete|arrive whole}, so it {is sent with|goes over} TCP.
-
{Use UDP|UDP is used|UDP is the right choice} for {calls, games and live video|calls and games|live video and calls}, {where|because} {a late packet is useless|speed matters more}.
{In a game or a call|In a call|In a live video} {an old packet|a late packet} is {useless|of no use}, so {UDP is better|they use UDP}.
{For a call|For live sound}, UDP is better: {it is better to lose a word than to wait|a short noise is better than a long pause}.

# handshake 2 4
? How {does the TCP handshake work|is a TCP connection opened}?
? What is the {three-way handshake|TCP handshake}?
{A TCP connection is opened|The connection is opened} in three steps.
{The handshake|The TCP handshake|It} {has three steps|takes three messages}.
-
{First the client|The client} sends {a packet with the flag SYN|a SYN packet}. The server answers with SYN and ACK. {Then the client sends ACK|The client replies with ACK}, and the connection is open.
{The client sends SYN|First comes SYN from the client}, the server {replies|answers} with SYN and ACK, and the client {ends the handshake|finishes} with ACK.
-
{In this way|After that} {both sides know|each side knows} {where the numbers of the other side begin|the first sequence number of the other}.
{Now|After that} {both sides|the two sides} {know|have told each other} their first sequence numbers, and {data can flow|the data can follow}.

# port 2 4
? What is a port{| number}?
? {Why do we need|What are} ports{| for}?
A port is a number {from 0 to 65535|between 0 and 65535} that {tells the computer|says} which program {should get|is to get|gets} a packet.
{A computer runs|On one computer there are} many programs, and the port {number says|tells} {which of them|which one} {a packet is for|gets the packet}.
-
{The address|The IP address} {finds|leads to} the computer, and the port {finds|leads to} the program.
{The address is like|Think of the address as} the number of a house{,|} and {of the port as|the port is like} the number of a {room|flat} in it.
-
{A web server|Web servers} {usually listens|listens|usually wait} on port {80 or 443|443}.
{A web page comes|Web pages come} from port 80 or 443, {mail|a mail server} uses port 25, and DNS {uses|has} port 53.

# IP address 2 4
? What is an IP address{| for}?
? {Explain IP addresses|Tell me about IP addresses}.
An IP address is {the number of a computer|a number that names a computer} in a network.
{Every|Each} computer in a network has {a number of its own|its own number}, {called|which is called} {its|the} IP address.
-
{Routers|The routers} read the address {of each packet|in every packet} and {pass the packet on|send the packet on}{| until it arrives}.
{With this number|By this number} {the network|the routers} can {find the way|find the computer}.
-
{An IPv4 address|An address of version 4} has 32 bits, {and an IPv6 address|one of version 6} has 128 bits.
{There are|We use} two kinds: {short ones|IPv4} with 32 bits and {long ones|IPv6} with 128 bits.

# router 2 4
? What {is a router|does a router do}?
? {Explain what a router does|Why do we need routers}{.|?}
A router {connects|joins} {networks|two or more networks} {and|,} {passes packets from one to the other|sends packets on their way}{|, one by one}.
{A router is|The router is} a {device|small computer} that {sends|passes} packets {from one network to another|between networks}.
-
It {reads|looks at} the {destination address|address} of {each|every} packet and {looks into a table|asks its table} {to find|for} the next {step|router|hop}.
{In its table|It has a table where} {it finds|it sees} {which way|where} {a packet|each packet} must go.
-
{Your router at home|The router at home} {connects|joins} {your computers|your devices|the house} {to|with} the internet.
{A packet|One packet} may {pass|go through} {ten or more|many} routers before it {arrives|reaches its goal}.

# switch 2 3
? What {is a switch|does a network switch do}?
A switch {connects|joins} the computers of {one local network|one house or office}.
-
It {learns|remembers} {which computer is|who is} behind which {port|cable}, and sends {each frame|the data} only {there|where it belongs}.
-
{A switch works|It works} inside one network, {while|and} a router {works between|connects} networks.

# DNS 2 4
? {What is DNS|What does DNS do|How does DNS work|Explain DNS}?
DNS {turns|changes|translates} names into {addresses|IP addresses}.
DNS is {like a telephone book|the telephone book} of the internet: {you give a name|it gets a name} and {you get|gives back} an address.
-
{Your computer|The computer} asks a name server, {and the server|which} {answers with|sends back} {an address|the IP address}.
{When you type a name|When you open a page}, {your computer|the computer} first asks {a name server|DNS} for the address.
-
The answer is {kept|stored} for {a while|some time}, so the next {question|request} is {faster|answered at once}.
{Answers are kept|The computer keeps the answer} in a cache, {so it need not ask|and does not ask} again {at once|every time}.

# packet 2 4
? What is a {packet|network packet}?
? {How does data travel|How are files sent} {through|over} a network?
A packet is a small {piece|part} of data with a header.
{Data travels|All data travels} {through the network|over a network} in small {pieces|parts}, {called|which we call} packets.
-
The header {says|tells} where {the packet|it} comes from and where it {must go|is going}.
{In front of the data|At the front} is a header with {both addresses|the two addresses}{| and some other numbers}.
-
A {large|big|long} file is {cut|divided|split} into many packets, and the receiver puts them {together|back together}{| again}.
{Each packet|Every packet} may take {its own way|another way} {through the network|}.

# latency 2 4
? What {is latency|does latency mean}?
Latency is the time {that a packet needs|a packet needs} {to reach the other side|for its way}.
The latency {tells us|says} how long a packet {is on its way|travels}.
-
{It is|Latency is} measured in milliseconds.
{Think of a road|It is like a road}: the latency is how long it is, and the bandwidth is how wide.
-
{Calls and games|Games and calls} need a low latency, {while|but} {a download|a large file} needs {more|a high} bandwidth.
{A fast line|A line with much bandwidth} can still have {a high|a long} latency, {if the way is long|because the way is long}.

# bandwidth 2 4
? What {is bandwidth|does bandwidth mean}?
Bandwidth {says|tells us} how much data {can pass in one second|passes in a second}.
The bandwidth {of a line|} is the {amount of data|number of bits} that {can pass|passes} in one second.
-
{It is|Bandwidth is} measured in bits per second.
{Think of a road|It is like a road}: the bandwidth is how wide it is, and the latency is how long.
-
{A download|Large files} {needs|need} {much|a high} bandwidth, {while|but} {calls and games|games} need a low latency.

# congestion control 2 3
? {What is congestion control|How does TCP avoid congestion}?
{Congestion control|It} keeps {senders|a sender} from {filling|flooding} the network.
-
{When packets are lost|When it sees lost packets}, TCP {sends less|makes its window smaller}; when all goes well, it {slowly|carefully} sends more.
-
{In this way|So} many {connections|computers} can {share|use} one line {fairly|}.

# HTTP 2 4
? {What is HTTP|Explain HTTP|How does a web page reach my computer}?
HTTP is the protocol of {the web|web pages}.
HTTP is the {language|set of rules} in which {browsers|a browser} and {servers|a web server} talk.
-
{The browser|The client} sends a request with a method {and a path|, a path and headers}, {and|} the server {sends back|answers with} a status code and {the page|a body}.
{The browser asks for|A browser asks for} a page, and the server {sends it|answers} {with a status code|}.
-
{HTTP runs|It runs} over TCP, {and|but} {its newest version|the newest version} {uses|runs over} QUIC, which is built on UDP.

# firewall 2 3
? What {is a firewall|does a firewall do}?
A firewall {checks|looks at} {packets|every packet} and {decides|says} which {may pass|of them may pass}.
-
It has a list of rules {about|for} addresses, ports and protocols.
-
{What is not allowed|A packet that is not allowed} is {dropped|thrown away}{| or sent back with an error}.

# socket 2 3
? What is a {socket|network socket}?
A socket is the {end|end point} of a connection in a program.
-
A server {binds|ties} its socket to a port, {listens|waits} and accepts connections; a client {connects|joins} its own socket to {that|the} port.
-
{Through the socket|With it} the program reads and writes {bytes|data} {as if it were|much like} a file.

# NAT 2 3
? What {is NAT|does NAT do}?
NAT changes the addresses in packets, so that {many computers|a whole house} can {share|use} one public address.
{A router with NAT|With NAT, the router} {replaces|changes} the private addresses {of a house|of many computers} by one public address.
-
The router {remembers|notes} the ports, so {the answers|each answer} {find|finds} the way back.
{For every connection|For each connection} it {writes down|remembers} who {began|started} it.

# DHCP 2 3
? What {is DHCP|does DHCP do}?
DHCP gives a computer its address {and other settings|} {when it joins|when it enters} a network.
{With DHCP|Thanks to DHCP} {nobody has to|you need not} {type|write} addresses by hand.
-
{The computer asks|A new computer asks} {all others|everybody in the network}, and {a server|the server} {offers|gives} it an address for {some time|a while}.

# checksum 2 3
? What is a checksum{| good for}?
? Why {does TCP use a checksum|do packets have a checksum}?
A checksum is a {small|short} number that is {computed|made} from the data.
-
{The receiver|The other side} computes it {again|once more}; if {the two numbers differ|it does not fit}, the packet was {damaged|changed} on its way and is thrown away.

# ping 2 3
? What {is ping|does ping do}{| good for}?
Ping {sends|is a program that sends} a small packet to another computer and waits for the {reply|answer}.
-
The reply shows that the other computer {is there|can be reached} and how long the way {takes|is}.
{Without a reply|When nothing comes back}, {the other computer is off|something is broken} or {a firewall|the firewall} {drops|stops} the packet.

# mixture of experts 2 5
? {What is a mixture of experts|Explain mixture of experts|What is an MoE model}{| in simple words}?
A mixture of experts is a model {made of|with} many small {networks|parts}, {which are called|called} experts.
{In a mixture of experts|In such a model}, {one layer|each layer} {holds|has} many small networks, the experts.
-
{For each word|For every token} a router picks {a few experts|only a few of them}{, and|;} {the others|all the others} {rest|do nothing}.
{A router|The router} gives {each expert|every expert} a score and {takes|picks} the best {few|ones}.
-
So the model can {know much|be large} and still {be fast|needs little work for one word}.
{Only a small part|A small part} of the model {works|is used} {for one token|at a time}, {which saves time|so it is fast}.
-
{The experts|Experts that are not needed} can {stay|wait} on {the disk|a disk}, and {only the chosen ones are read|are read when they are chosen}.

# cache 2 4
? What is {a cache|an LRU cache}?
? Why does a cache help?
A cache keeps {data|things} {that will be needed again|that may be needed again} in fast memory.
{A cache is|Think of a cache as} a small {store|shelf} {near you|close at hand} for things you {use often|need often}.
-
{When it is full|When there is no more room}, {something must go|old data is thrown out}; {LRU throws out|an LRU cache drops} what was not used for the longest time.
-
{If the data is there|When the data is found}, we call it a hit; {if not|otherwise} it is a miss{| and must be fetched}.

# quantisation 2 4
? {What is NVFP4|What is quantisation|How can four bits hold a number}?
{Quantisation stores|To quantise means to store} numbers with {fewer|less} bits.
NVFP4 is a {number format|way to write numbers} with four bits.
-
{In NVFP4 there are|Four bits give} only sixteen {different|} values, {so|and so} sixteen neighbours share {a scale|one scale}.
-
{The model becomes|This makes the model} {smaller|four times smaller} and {faster to read|quicker to load}, {and loses|but it loses} {a little|some} {precision|accuracy}.

# perplexity 2 3
? What {is perplexity|does perplexity mean}?
Perplexity {tells|says} how {surprised|puzzled} a model is by a text.
-
{A low number|A small perplexity} means that the model {expected|guessed} {the words|most words} well.
-
A model that {guesses|must choose} among ten equal words has a perplexity of ten.

# who are you 1 3
? {Who are you|What are you|What is your name|Introduce yourself|Tell me about yourself}{.|?}
I am a {very small|tiny} language model with a mixture of experts.
{I am|My name is nemolab tiny, and I am} a {tiny|very small} model {that was made for tests|for tests and lessons}.
-
I was trained on {a few megabytes|a small amount} of free text, {so|and} I know {little|only a little} and make mistakes.
-
{I can|What I can do:} {tell short stories|explain simple words} and talk about networks.

# what can you do 1 3
? {What can you do|How can you help me|What do you know}?
I can {tell|write} {short stories|a short story}, {explain|talk about} networks and {answer|talk about} simple questions.
-
I {also|} speak a little Russian.
-
I am {small|a small model}, so please {check|do not trust everything} what I say.
""")
